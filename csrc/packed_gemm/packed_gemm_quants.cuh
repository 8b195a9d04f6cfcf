// Quants as operands of products in float16 or bfloat16: less their zero, times their scale, rounded once.
#pragma once

#include "common/mma.cuh"
#include "common/numeric.cuh"
#include "common/warp.cuh"
#include "packed_gemv/packed_gemv.h"
#include "weights/packed_table.cuh"

namespace hf_fastpath {

// 128 bytes of a row are a piece; a lane reads 16 of them at a time.
template <PackedFormat kFormat>
struct PackedPiece {
  static constexpr int kBits = bits_of(kFormat);
  static constexpr int kBlocks = kBits == 4 ? 2 : 1;
  static constexpr int kLoads = kBits == 4 ? 1 : 4;  // of 16 bytes of a block's row, by a lane
  // Shared memory has blocks of 64 bytes a row, or of 128 in the order of swizzled copies: lanes of two rows
  // that read at a time find different banks.
  static constexpr int kRowBytes = 16 * kBits;
  static constexpr int kScales = Traits<kFormat>::kScaleHalves;  // in 16 bits
};

// Scales and zeros of a piece, of one row.
template <PackedFormat kFormat>
struct PieceScales {
  using Piece = PackedPiece<kFormat>;
  uint32_t scales[Piece::kBlocks][2];
  static constexpr int kZeros = Traits<kFormat>::kZerosPerBlock;
  uint32_t zeros[Piece::kBlocks];  // one, or four bytes

  // `row`: its first group's place. A piece behind the row's last block gets that block's.
  __device__ __forceinline__ void load(const PackedMatrix& matrix, int row, int piece) {
#pragma unroll
    for (int b = 0; b < (Piece::kScales ? Piece::kBlocks : 0); ++b) {
      const int block = min(piece * Piece::kBlocks + b, matrix.blocks - 1);
      const uint16_t* from = matrix.scales + row + block * Piece::kScales;
      if constexpr (Piece::kScales == 4) {
        const uint2 raw = __ldg(reinterpret_cast<const uint2*>(from));
        scales[b][0] = raw.x, scales[b][1] = raw.y;
      } else if constexpr (Piece::kScales == 2) {
        scales[b][0] = __ldg(reinterpret_cast<const uint32_t*>(from));
      } else {
        scales[b][0] = __ldg(from);
      }
      if constexpr (kZeros == 4) {
        zeros[b] = __ldg(reinterpret_cast<const uint32_t*>(matrix.zeros + row + block * kZeros));
      } else if constexpr (kZeros == 1) {
        zeros[b] = __ldg(matrix.zeros + row + block);
      }
    }
  }
  // Returns a sub-block's scale, as bits of a float16 twice or of a float32.
  __device__ __forceinline__ uint32_t scale(int block, int sub_block) const {
    if constexpr (Traits<kFormat>::kScaleBytes == 4)
      return scales[block][sub_block / Traits<kFormat>::kTogether];
    if constexpr (Piece::kScales == 4)
      return __byte_perm(scales[block][sub_block / 2], 0, sub_block % 2 ? 0x3232 : 0x1010);
    return __byte_perm(scales[block][0], 0, 0x1010);
  }
  __device__ __forceinline__ int zero(int block, int sub_block) const {
    if constexpr (kZeros == 4) return static_cast<int>(__byte_perm(zeros[block], 0, 0x4440 + sub_block));
    return Traits<kFormat>::kHasZeros ? static_cast<int>(zeros[block]) : Traits<kFormat>::kZero;
  }
};

template <class T>
struct Pair;
template <>
struct Pair<__half> {
  using Type = __half2;
  static __device__ __forceinline__ Type all(float value) { return __float2half2_rn(value); }
};
template <>
struct Pair<__nv_bfloat16> {
  using Type = __nv_bfloat162;
  static __device__ __forceinline__ Type all(float value) { return __float2bfloat162_rn(value); }
};
template <class P>
__device__ __forceinline__ uint32_t bits_of_pair(P pair) {
  return *reinterpret_cast<uint32_t*>(&pair);
}
template <class T>
__device__ __forceinline__ typename Pair<T>::Type pair_of(uint32_t bits) {
  return *reinterpret_cast<typename Pair<T>::Type*>(&bits);
}
// (value & kMask) | kBits
template <uint32_t kMask, uint32_t kBits>
__device__ __forceinline__ uint32_t masked_or(uint32_t value) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(value), "n"(kMask), "n"(kBits));
  return result;
}

// What stands for a scale where sums are multiplied by it.
struct Unscaled {
  __device__ __forceinline__ explicit Unscaled(uint32_t) {}
  template <class P>
  __device__ __forceinline__ uint32_t operator()(P value) const {
    return bits_of_pair(value);
  }
};

// A sub-block's scale for one row, and its application.
template <class T>
struct SubBlockScale;
template <>
struct SubBlockScale<__half> {
  __half2 all;
  __device__ __forceinline__ explicit SubBlockScale(uint32_t twice) : all(pair_of<__half>(twice)) {}
  __device__ __forceinline__ uint32_t operator()(__half2 value) const {
    return bits_of_pair(__hmul2(value, all));
  }
};
// The scale in two terms, as bfloat16 holds not all of it.
template <>
struct SubBlockScale<__nv_bfloat16> {
  __nv_bfloat162 high, low;
  __device__ __forceinline__ explicit SubBlockScale(uint32_t twice) {
    const float whole = unpack2(twice, __half()).x;
    high = __float2bfloat162_rn(whole);
    low = __float2bfloat162_rn(whole - __bfloat162float(high.x));
  }
  __device__ __forceinline__ uint32_t operator()(__nv_bfloat162 value) const {
    return bits_of_pair(__hfma2(value, high, __hmul2(value, low)));
  }
};

// A sub-block's quants as its lane wants them, two neighbors of each eight: lane q of a quad the q-th two. A
// lane's loads are words of a sub-block.
template <class T, PackedFormat kFormat, class = void>
struct LaneQuants {  // 8 bits: of four words a half each
  static constexpr bool kHalf = std::is_same_v<T, __half>;
  static constexpr int kWords = 4;
  // This finds the lane's half of a word: how many bits it is up there, or the choice of its bytes.
  uint32_t which;

  __device__ __forceinline__ LaneQuants() {
    const bool upper = threadIdx.x % 2;
    if (!Traits<kFormat>::kIsFloat)
      which = upper ? 0x4342 : 0x4140;
    else if (kHalf)
      which = upper ? 16 : 0;
    else
      which = upper ? 0x3424 : 0x1404;
  }
  // Which word of a sub-block the lane's i-th load has.
  static __device__ __forceinline__ int word(int i) { return 2 * i + threadIdx.x % 4 / 2; }
  __device__ __forceinline__ void operator()(const uint32_t (&loaded)[4], uint32_t (&words)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = loaded[i];
  }
};
// 4 bits: lane w has word w, and lanes swap bytes. The two neighbors are a byte: all in a word, or four times
// each in four.
template <class T, PackedFormat kFormat>
struct LaneQuants<T, kFormat, std::enable_if_t<bits_of(kFormat) == 4>> {
  static constexpr int kWords = std::is_same_v<T, __half> && !has_table(kFormat) ? 4 : 1;
  uint32_t halves, all, bytes[4];  // choices of bytes

  __device__ __forceinline__ LaneQuants() {
    const int q = threadIdx.x % 4;
    halves = q >= 2 ? 0x3276 : 0x5410;
    all = q % 2 ? 0x3715 : 0x6240;
    bytes[0] = q % 2 ? 0x5555 : 0x0000;
    bytes[1] = q % 2 ? 0x1111 : 0x4444;
    bytes[2] = q % 2 ? 0x7777 : 0x2222;
    bytes[3] = q % 2 ? 0x3333 : 0x6666;
  }
  static __device__ __forceinline__ int word(int) { return threadIdx.x % 4; }
  __device__ __forceinline__ void operator()(const uint32_t (&loaded)[1], uint32_t (&words)[4]) const {
    const uint32_t own = __byte_perm(loaded[0], __shfl_xor_sync(kAllLanes, loaded[0], 2), halves);
    const uint32_t other = __shfl_xor_sync(kAllLanes, own, 1);
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = __byte_perm(own, other, bytes[i]);
  }
  __device__ __forceinline__ void operator()(const uint32_t (&loaded)[1], uint32_t (&words)[1]) const {
    const uint32_t own = __byte_perm(loaded[0], __shfl_xor_sync(kAllLanes, loaded[0], 2), halves);
    words[0] = __byte_perm(own, __shfl_xor_sync(kAllLanes, own, 1), all);
  }
};

// A lane's pairs of a sub-block, of one row: pair[2 step + half] is for k 8 half + 2 q of the step's 16.
// `zero`: of quants that are not signed.
template <class T, PackedFormat kFormat>
__device__ __forceinline__ void dequantize_sub_block(const LaneQuants<T, kFormat>& lane,
                                                     const uint32_t (&loaded)[PackedPiece<kFormat>::kLoads],
                                                     uint32_t scale_bits, int zero, uint32_t (&pair)[4]) {
  constexpr bool kHalf = std::is_same_v<T, __half>;
  uint32_t words[LaneQuants<T, kFormat>::kWords];
  lane(loaded, words);
  if constexpr (Traits<kFormat>::kHasTable) {
    const float scale = __uint_as_float(scale_bits) * (1.f / Traits<kFormat>::kSteps);
    table_pairs<kFormat>(words[0], pair);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 two = unpack2(pair[i], __half());
      pair[i] = pack2(two.x * scale, two.y * scale, T());
    }
  } else if constexpr (Traits<kFormat>::kIsFloat && !Traits<kFormat>::kScalesSums) {
    const float scale = __uint_as_float(scale_bits);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto bits = static_cast<uint16_t>(words[i] >> (threadIdx.x % 2 * 16));
      uint32_t halves;
      asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(bits));
      const float2 two = unpack2(halves, __half());
      pair[i] = pack2(two.x * scale, two.y * scale, T());
    }
  } else if constexpr (Traits<kFormat>::kIsFloat) {  // the scale is a row's
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kHalf) {
        const uint16_t bits = static_cast<uint16_t>(words[i] >> lane.which);
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair[i]) : "h"(bits));
      } else {  // 2^-120 of the value as long as the exponent's bias is not that of bfloat16
        const uint32_t bits = __byte_perm(words[i], 0, lane.which);
        const uint32_t small = (bits & 0x80008000u) | (bits >> 4 & 0x07f007f0u);
        pair[i] = bits_of_pair(__hmul2(pair_of<T>(small), pair_of<T>(0x7b807b80u)));
      }
    }
  } else {
    // Quants of a row's scale stay whole numbers.
    const std::conditional_t<Traits<kFormat>::kScalesSums, Unscaled, SubBlockScale<T>> scaled(scale_bits);
    if constexpr (Traits<kFormat>::kBits == 8) {
      constexpr bool kSigned = Traits<kFormat>::kIsSigned;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (kHalf) {  // 1024 and more, whose last bits are units
          const uint32_t bits = __byte_perm(kSigned ? words[i] ^ 0x80808080u : words[i], 0x64, lane.which);
          pair[i] = scaled(__hsub2(pair_of<T>(bits), Pair<T>::all(1024.f + (kSigned ? 128 : zero))));
        } else if constexpr (!kSigned) {  // less its zero each has eight bits, and before that as many: in
                                          // float16
          const uint32_t bits = __byte_perm(words[i], 0x64, lane.which);
          const __half2 steps = __hsub2(pair_of<__half>(bits), Pair<__half>::all(1024.f + zero));
          pair[i] = scaled(__floats2bfloat162_rn(__low2float(steps), __high2float(steps)));
        } else {  // 128 and more; a negative quant's low seven bits are 128 too much
          const uint32_t bits = __byte_perm(words[i], 0, lane.which);
          pair[i] = scaled(__hsub2(pair_of<T>(masked_or<0x007f007fu, 0x43004300u>(bits)),
                                   pair_of<T>(masked_or<0x00800080u, 0x43004300u>(bits))));
        }
      }
    } else if constexpr (kHalf) {  // a byte's upper quant is 16 times as much
      const auto units = __halves2half2(__float2half(1.f), __float2half(0.0625f));
      const auto excess = __halves2half2(__int2half_rn(-1024 - zero), __int2half_rn(-64 - zero));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        pair[i] = scaled(__hfma2(pair_of<T>(masked_or<0x00f0000fu, 0x64006400u>(words[i])), units, excess));
      }
    } else {
      const auto excess = Pair<T>::all(128.f + zero);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t bits = __byte_perm(words[0], words[0] >> 4, 0x4400 + i * 0x1111);
        pair[i] = scaled(__hsub2(pair_of<T>(masked_or<0x000f000fu, 0x43004300u>(bits)), excess));
      }
    }
  }
}

}  // namespace hf_fastpath
