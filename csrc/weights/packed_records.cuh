// Sums of a warp over rows of a weight whose blocks have records: for packed_gemv_records.cu and
// packed_experts_records.cu, which say how a warp gets its rows.
#pragma once

#include <type_traits>

#include "common/numeric.cuh"
#include "common/warp.cuh"
#include "weights/packed_matrix.h"

namespace hf_fastpath {

__device__ __forceinline__ float2 floats_of(uint32_t halves) {
  return __half22float2(*reinterpret_cast<const __half2*>(&halves));
}

// Byte i of a word, in the last bits of 2^23.
__device__ __forceinline__ float byte_above(uint32_t word, int i) {
  return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 + i));
}

// A block's record.
template <PackedFormat kFormat>
struct Record {
  static constexpr PackedScales kScales = traits_of(kFormat).scales;
  static constexpr bool kArePairs = are_pairs(kScales);
  static constexpr int kWords = Traits<kFormat>::kRecordBytes / 4;
  uint32_t word[kWords];

  __device__ __forceinline__ void load(const PackedMatrix& matrix, int64_t row, int block) {
    const auto* from =
        reinterpret_cast<const uint32_t*>(matrix.scales) + (row * matrix.blocks + block) * kWords;
    if constexpr (kWords == 4) {
      const uint4 all = __ldg(reinterpret_cast<const uint4*>(from));
      word[0] = all.x, word[1] = all.y, word[2] = all.z, word[3] = all.w;
    } else {
#pragma unroll
      for (int i = 0; i < kWords; ++i) word[i] = __ldg(from + i);
    }
  }
  // Returns the scale and the minimum of sub-block s, or of the half of it that the lane has a word of.
  __device__ __forceinline__ float2 factors(int s, bool second_half) const {
    if constexpr (kArePairs) {
      float2 pair = floats_of(word[s]);
      if constexpr (kScales == PackedScales::kFloatZeros) pair.y = -pair.x * pair.y;  // exact
      if constexpr (kScales == PackedScales::kMiddles) pair.y -= 8.f * pair.x;
      return pair;
    }
    constexpr float kUnits = 8388608.f;
    const float2 of_block = floats_of(word[0]);
    if constexpr (kScales == PackedScales::kKMinimums) {  // products and sums are exact
      return make_float2(fmaf(of_block.x, byte_above(word[1], s), -kUnits * of_block.x),
                         fmaf(-of_block.y, byte_above(word[2], s), kUnits * of_block.y));
    } else {
      const uint32_t of_half = (second_half ? word[2] : word[1]) ^ 0x80808080u;
      return make_float2(of_block.x * (byte_above(of_half, s) - (kUnits + 128.f)), 0.f);
    }
  }
};

// A word's quants: whole numbers in the last bits of 2^23 and more.
template <int kBits>
__device__ __forceinline__ void unpack_word(uint32_t word, float (&to)[32 / kBits]) {
  constexpr float kUnits = 8388608.f;
#pragma unroll
  for (int i = 0; i < 32 / kBits; ++i) {
    if constexpr (kBits == 4) {
      to[i] = __uint_as_float((word >> 4 * i & 15u) | 0x4b000000u) - kUnits;
    } else {
      to[i] = __uint_as_float(__byte_perm(word ^ 0x80808080u, 0x4b000000u, 0x7440 + i)) - (kUnits + 128.f);
    }
  }
}

// So many neighbors of x, of which `left` exist. kWhole: all of them do, and are aligned to four.
template <bool kWhole, class T, int kCount>
__device__ __forceinline__ void load_inputs(const T* from, int left, float (&to)[kCount]) {
  static_assert(kCount % 4 == 0);
  if constexpr (!kWhole) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = i < left ? to_float(__ldg(from + i)) : 0.f;
    return;
  }
#pragma unroll
  for (int at = 0; at < kCount; at += 4) {
    if constexpr (sizeof(T) == 4) {
      const float4 four = __ldg(reinterpret_cast<const float4*>(from + at));
      to[at] = four.x, to[at + 1] = four.y, to[at + 2] = four.z, to[at + 3] = four.w;
    } else {
      const uint2 four = __ldg(reinterpret_cast<const uint2*>(from + at));
      const float2 front = unpack2(four.x, T()), back = unpack2(four.y, T());
      to[at] = front.x, to[at + 1] = front.y, to[at + 2] = back.x, to[at + 3] = back.y;
    }
  }
}

// Adds to sums[part][m] the lane's part of the product of row rows[part] of the weight and x_of(m), a row of
// `width` values. kWhole: as of load_inputs().
template <PackedFormat kFormat, bool kWhole, int kParts, int kX, class XOf, class Sum>
__device__ __forceinline__ void add_record_products(const PackedMatrix& matrix, const void* all_quants,
                                                    const int64_t (&rows)[kParts], int width, const XOf& x_of,
                                                    Sum (&sums)[kParts][kX]) {
  constexpr int kBits = Traits<kFormat>::kBits, kNeighbors = 32 / kBits;
  constexpr int kLanes = kBits;  // of a block, 16 bytes each: a word of each sub-block
  constexpr bool kIsFloat = std::is_same_v<decltype(x_of(0)), const float*>;
  const int lane = threadIdx.x % kWarpSize, place = lane % kLanes;
  const auto* const quants = static_cast<const uint4*>(all_quants);
#pragma unroll 1
  for (int block = lane / kLanes; block < matrix.blocks; block += kWarpSize / kLanes) {
    uint4 raw[kParts];
    Record<kFormat> record[kParts];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      raw[part] = __ldcs(quants + (rows[part] * matrix.blocks + block) * kLanes + place);
      record[part].load(matrix, rows[part], block);
    }
#pragma unroll
    for (int s = 0; s < int(kSubBlocks); ++s) {
      const int first = block * int(kPackedBlock) + s * int(kSubBlock) + place * kNeighbors;
      if (first >= width) break;
      float quant[kParts][kNeighbors];
      float2 factors[kParts];
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const uint32_t words[4] = {raw[part].x, raw[part].y, raw[part].z, raw[part].w};
        unpack_word<kBits>(words[s], quant[part]);
        factors[part] = record[part].factors(s, place >= kLanes / 2);
      }
#pragma unroll
      for (int m = 0; m < kX; ++m) {
        float given[kNeighbors];
        load_inputs<kWhole>(x_of(m) + first, width - first, given);
        float of_x = 0.f;
        if constexpr (Traits<kFormat>::kHasMinimums) {
#pragma unroll
          for (int i = 0; i < kNeighbors; ++i) of_x += given[i];
        }
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          float dot = 0.f;
          if constexpr (kIsFloat && Traits<kFormat>::kHasMinimums) {  // two large sums would cancel
#pragma unroll
            for (int i = 0; i < kNeighbors; ++i)
              dot = fmaf(fmaf(factors[part].x, quant[part][i], factors[part].y), given[i], dot);
            sums[part][m] += dot;
          } else {
#pragma unroll
            for (int i = 0; i < kNeighbors; ++i) dot = fmaf(quant[part][i], given[i], dot);
            sums[part][m] = fma(Sum(factors[part].x), Sum(dot), sums[part][m]);
            if constexpr (Traits<kFormat>::kHasMinimums)
              sums[part][m] = fma(Sum(factors[part].y), Sum(of_x), sums[part][m]);
          }
        }
      }
    }
  }
}

// The sum over all lanes, the same in each.
template <class Sum>
__device__ __forceinline__ float sum_of_lanes(Sum all) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) all += __shfl_xor_sync(kAllLanes, all, offset);
  return static_cast<float>(all);
}

}  // namespace hf_fastpath
