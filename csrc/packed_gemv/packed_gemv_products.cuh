// Products of blocks of quants with x, for packed_gemv_ring.cuh.
#pragma once

#include "packed_gemv/packed_gemv_reader.cuh"
#include "packed_gemv/packed_gemv_x.cuh"

namespace hf_fastpath {

template <int kColumns>
constexpr int kColumnTiles = (kColumns + 7) / 8;

template <int kColumns>
using PackedAccumulators = float[kColumnTiles<kColumns>][4];  // as C of mma()

// A lane's words of a block, of rows g and g + 8: word s of 16 bytes is of sub-block s.
template <PackedFormat kFormat>
struct BlockWords {
  static constexpr int kLoads = kBits<kFormat> / 4;
  uint32_t word[2][kLoads][4];

  template <class Reader>
  __device__ __forceinline__ void load(const Reader& reader, const TileRows& rows, int block) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const uint4 raw = reader.quants(rows, h, block, i);
        word[h][i][0] = raw.x, word[h][i][1] = raw.y, word[h][i][2] = raw.z, word[h][i][3] = raw.w;
      }
  }

  // A of a sub-block's two products: pairs[product] are a0 to a3. `zero`: of both rows, for centered quants.
  template <bool kCentered, int kTerm = 0>
  __device__ __forceinline__ void operands(uint32_t (&pairs)[2][4], int sub_block,
                                           const int (&zero)[2]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const Quants<kFormat, kCentered, kTerm> quants(word[h][i][sub_block], zero[h]);
#pragma unroll
        for (int product = 0; product < quants.kProducts; ++product) {
          pairs[i + product][h] = quants.pair[product][0],
                    pairs[i + product][h + 2] = quants.pair[product][1];
        }
      }
  }
};

// Scales and zeros of a block, for a lane: of rows g and g + 8.
template <PackedFormat kFormat>
struct LineScales {
  static constexpr bool kEachSubBlock = Traits<kFormat>::kEachSubBlock;
  static constexpr bool kZeroOfEach = Traits<kFormat>::kZerosPerBlock == 4;
  uint2 words[2];
  int zeros[2];  // or four bytes of each row

  // `block`: of this warp's in the piece, of which there are `left` from it on.
  template <class Reader>
  __device__ __forceinline__ LineScales(const Reader& reader, const TileRows& rows, int block, int left) {
    zeros[0] = zeros[1] = Traits<kFormat>::kZero;
    if constexpr (Traits<kFormat>::kScalesSums) return;
    if (left <= 0 && !reader.fetches_scales()) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      words[h] = reader.scales(rows, h, block);
      if constexpr (Traits<kFormat>::kHasZeros) zeros[h] = reader.zero(rows, h, block);
    }
  }

  // Gives the zeros of both rows, of a sub-block.
  __device__ __forceinline__ void zeros_of(int sub_block, int (&of)[2]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h)
      of[h] = kZeroOfEach ? static_cast<int>(__byte_perm(zeros[h], 0, 0x4440 + sub_block)) : zeros[h];
  }

  // Returns the scale of a row of the lane's and a sub-block.
  __device__ __forceinline__ float of(int h, int sub_block) const {
    if constexpr (Traits<kFormat>::kScaleBytes == 4)
      return __uint_as_float(Traits<kFormat>::kTogether == 4 || sub_block < 2 ? words[h].x : words[h].y);
    if constexpr (!kEachSubBlock) return unpack2(words[h].x, __half()).x;
    const float2 two = unpack2(sub_block < 2 ? words[h].x : words[h].y, __half());
    return sub_block % 2 ? two.y : two.x;
  }
};

// What quants have in excess times x, in the lane's two columns of tile t; those that do not exist are others
// once more: nobody reads their sums.
template <int kColumns, class X>
__device__ __forceinline__ float2 excess(const X& x, int sum, int t) {
  const int q = threadIdx.x % 4, column = kColumns >= 8 || 2 * q < kColumns ? t * 8 + 2 * q : 0;
  return *reinterpret_cast<const float2*>(x.sums + sum * kColumns + column);
}

// Adds a block's products. `block`: of this warp's in the piece; `of_x`: where x has its operands for this
// lane; `of_sums`: which block it is for x.sums.
template <class T, PackedFormat kFormat, int kColumns, class Reader, class X>
__device__ __forceinline__ void add_block(const Reader& reader, const TileRows& rows,
                                          const LineScales<kFormat>& scales, const X& x, int block,
                                          uint32_t of_x, int of_sums,
                                          PackedAccumulators<kColumns>& accumulators) {
  constexpr int kTiles = kColumnTiles<kColumns>;
  constexpr bool kFloats = Traits<kFormat>::kIsFloat, kCentered = kCenters<T, kFormat>;
  constexpr bool kScalesSums = Traits<kFormat>::kScalesSums;
  constexpr bool kEachSubBlock = Traits<kFormat>::kEachSubBlock;  // has scales of its own
  constexpr bool kEachHalf = Traits<kFormat>::kTogether == 2;     // or two have
  BlockWords<kFormat> words;
  words.load(reader, rows, block);
  // Tensor cores cut sums off: those of a float32 x are short, and what the first float16 of a table's
  // values leave is summed by itself, where it is not cut off beside larger products.
  constexpr bool kHasRest = kTermsOf<T, kFormat> == 2;
  constexpr int kChains = sizeof(T) == 2 ? 1 : kHasRest || kEachHalf || kEachSubBlock ? 2 : 4;
  float c[kChains][kTiles][4] = {};
  float c_rest[kHasRest ? kTiles : 1][4] = {};
#pragma unroll
  for (int s = 0; s < int(kSubBlocks); ++s) {
    uint32_t a[2][4];
    int zeros[2];
    scales.zeros_of(s, zeros);
    words.template operands<kCentered>(a, s, zeros);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const uint4 b = load_shared(of_x + (s * kColumns + t * 8) * 64);
      auto& to = c[s % kChains][t];
      mma<__half>(to, a[0][0], a[0][1], a[0][2], a[0][3], b.x, b.y);
      mma<__half>(kHasRest ? c[1][t] : to, a[1][0], a[1][1], a[1][2], a[1][3], b.z, b.w);
      if constexpr (kHasRest) {
        uint32_t rest[2][4];
        words.template operands<kCentered, 1>(rest, s, zeros);
        mma<__half>(c_rest[t], rest[0][0], rest[0][1], rest[0][2], rest[0][3], b.x, b.y);
        mma<__half>(c_rest[t], rest[1][0], rest[1][1], rest[1][2], rest[1][3], b.z, b.w);
      }
      if constexpr (kEachHalf) {
        if (s % 2 == 0) continue;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float all = kHasRest ? c_rest[t][i] : 0.f;
          if constexpr (kHasRest) c_rest[t][i] = 0.f;
#pragma unroll
          for (int chain = 0; chain < kChains; ++chain) all += c[chain][t][i], c[chain][t][i] = 0.f;
          accumulators[t][i] = fmaf(scales.of(i / 2, s), all, accumulators[t][i]);
        }
      }
      if constexpr (kEachSubBlock) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          accumulators[t][i] = fmaf(scales.of(i / 2, s), to[i], accumulators[t][i]);
          to[i] = 0.f;
        }
      }
    }
  }
  if constexpr (!kEachSubBlock && !kEachHalf) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      float2 over = {};
      if constexpr (!kFloats && !kCentered) over = excess<kColumns>(x, of_sums, t);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float all = c[0][t][i];
        if constexpr (kChains == 2) all += c[1][t][i];
        if constexpr (kChains == 4) all = (all + c[1][t][i]) + (c[2][t][i] + c[3][t][i]);
        if constexpr (!kFloats && !kCentered) {
          const float of_column = i % 2 ? over.y : over.x;
          all =
              Traits<kFormat>::kHasZeros ? fmaf(float(scales.zeros[i / 2]), of_column, all) : all + of_column;
        }
        if constexpr (kScalesSums) {
          accumulators[t][i] += all;
        } else {
          accumulators[t][i] = fmaf(scales.of(i / 2, 0), all, accumulators[t][i]);
        }
      }
    }
  }
}

// Adds what quants have in excess where each sub-block has a scale, for this warp's two blocks of a piece:
// one product of the scales with x's sums over sub-blocks, whose float16 and what that leaves are two halves
// of k. `of_x`: where x has them for this lane; `blocks`: how many of the two there are.
template <int kColumns, class Reader>
__device__ __forceinline__ void add_excess(const Reader& reader, const TileRows& rows, uint32_t of_x,
                                           int blocks, PackedAccumulators<kColumns>& accumulators) {
  const uint32_t scales[2] = {reader.two_scales(rows, 0, blocks), reader.two_scales(rows, 1, blocks)};
#pragma unroll
  for (int t = 0; t < kColumnTiles<kColumns>; ++t) {
    const uint2 b = load_shared_two(of_x + t * (kWarpSize * 8));
    mma<__half>(accumulators[t], scales[0], scales[1], scales[0], scales[1], b.x, b.y);
  }
}

}  // namespace hf_fastpath
