// Quants of experts' matrices on their way from device memory to tensor cores.
#pragma once

#include "common/mma.cuh"
#include "packed_experts/packed_experts.h"
#include "packed_gemv/packed_gemv_products.cuh"
#include "weights/packed_values.h"

namespace hf_fastpath {

// A lane's part of a block of both of its matrix rows, as it lies.
template <PackedFormat kFormat>
struct StackBlock {
  using Of = Traits<kFormat>;
  static constexpr int kLoads = kBits<kFormat> / 4;
  static constexpr int kScaleBytes = (Of::kScalesSums ? 1 : Of::kScalesPerBlock) * Of::kScaleBytes;
  static_assert(kScaleBytes == 8 || kScaleBytes == 4 || kScaleBytes == 2, "scales of a block are one load");
  uint4 quants[2][kLoads];
  uint2 scales[2];
  uint32_t zeros[2];

  // Returns the scale of row h and a sub-block.
  __device__ __forceinline__ float scale(int h, int s) const {
    if constexpr (Of::kScaleBytes == 1) {
      return power_value(scales[h].x >> 8 * s & 255u);
    } else if constexpr (Of::kScaleBytes == 4) {
      return __uint_as_float(s < Of::kTogether ? scales[h].x : scales[h].y);
    } else if constexpr (kScaleBytes == 2) {
      return __half2float(__ushort_as_half(static_cast<unsigned short>(scales[h].x)));
    } else {
      const float2 two = unpack2(s < 2 ? scales[h].x : scales[h].y, __half());
      return s % 2 ? two.y : two.x;
    }
  }
  __device__ __forceinline__ int zero(int h, int s) const {
    if constexpr (!Of::kHasZeros) return Of::kZero;
    return Of::kZerosPerBlock == 4 ? static_cast<int>(zeros[h] >> 8 * s & 255u) : static_cast<int>(zeros[h]);
  }
};

// Where a lane reads its two matrix rows.
template <PackedFormat kFormat>
struct StackRows {
  using Of = Traits<kFormat>;
  using Block = StackBlock<kFormat>;
  static constexpr int kBlockBytes = int(kPackedBlock) * kBits<kFormat> / 8;
  static constexpr int kStep = Of::kScalesSums ? 0 : Block::kScaleBytes;  // from block to block
  const char *quants[2], *scales[2];
  const uint8_t* zeros[2];

  __device__ __forceinline__ void find(const PackedExpertsProduct& p, int h, int64_t row) {
    const int64_t blocks = p.matrix.blocks;
    quants[h] = static_cast<const char*>(p.quants) + row * blocks * kBlockBytes +
                threadIdx.x % 4 * (16 * Block::kLoads);
    scales[h] = reinterpret_cast<const char*>(p.matrix.scales) +
                row * (Of::kScalesSums ? Of::kScaleBytes : blocks * Block::kScaleBytes);
    if constexpr (Of::kHasZeros) zeros[h] = p.matrix.zeros + row * blocks * Of::kZerosPerBlock;
  }

  __device__ __forceinline__ void load(Block& to, int block) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int i = 0; i < Block::kLoads; ++i) {
        to.quants[h][i] = Chunk<__half, 8>::load_once(
            reinterpret_cast<const __half*>(quants[h] + int64_t(block) * kBlockBytes + 16 * i));
      }
      // Neighboring blocks have theirs in the same sector: through L1.
      const char* const from = scales[h] + int64_t(block) * kStep;
      if constexpr (Block::kScaleBytes == 8) {
        to.scales[h] = __ldg(reinterpret_cast<const uint2*>(from));
      } else if constexpr (Block::kScaleBytes == 4) {
        to.scales[h].x = __ldg(reinterpret_cast<const uint32_t*>(from));
      } else {
        to.scales[h].x = __ldg(reinterpret_cast<const uint16_t*>(from));
      }
    }
  }

  // Zeros take registers once they are needed alone: they are where those of the block before were.
  __device__ __forceinline__ void load_zeros(Block& to, int block) const {
    if constexpr (Of::kHasZeros) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint8_t* const of_block = zeros[h] + block * Of::kZerosPerBlock;
        to.zeros[h] = Of::kZerosPerBlock == 4 ? __ldg(reinterpret_cast<const uint32_t*>(of_block))
                                              : static_cast<uint32_t>(__ldg(of_block));
      }
    }
  }
};

// Adds a block's products with x, of which a lane's operands lie at `of_lane`; is_there: else they are zeros.
template <class T, PackedFormat kFormat>
__device__ __forceinline__ void add_stack_block(const StackBlock<kFormat>& block, uint32_t of_lane,
                                                bool is_there, float (&accumulators)[4]) {
  using Of = Traits<kFormat>;
  constexpr bool kHasRest = kTermsOf<T, kFormat> == 2;
  BlockWords<kFormat> words;
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int i = 0; i < words.kLoads; ++i) {
      const uint4& raw = block.quants[h][i];
      words.word[h][i][0] = raw.x, words.word[h][i][1] = raw.y, words.word[h][i][2] = raw.z,
      words.word[h][i][3] = raw.w;
    }
  float c[2][4] = {}, rest[kHasRest ? 2 : 1][4] = {};  // two chains
#pragma unroll
  for (int s = 0; s < int(kSubBlocks); ++s) {
    const int zeros[2] = {block.zero(0, s), block.zero(1, s)};
    uint32_t a[2][4];
    words.template operands<true>(a, s, zeros);
    uint4 b = make_uint4(0, 0, 0, 0);
    if (is_there) b = load_shared(of_lane + s * 64);
    mma<__half>(c[0], a[0][0], a[0][1], a[0][2], a[0][3], b.x, b.y);
    mma<__half>(c[1], a[1][0], a[1][1], a[1][2], a[1][3], b.z, b.w);
    if constexpr (kHasRest) {
      words.template operands<true, 1>(a, s, zeros);
      mma<__half>(rest[0], a[0][0], a[0][1], a[0][2], a[0][3], b.x, b.y);
      mma<__half>(rest[1], a[1][0], a[1][1], a[1][2], a[1][3], b.z, b.w);
    }
    if ((s + 1) % Of::kTogether != 0) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float sum = c[0][i] + c[1][i];
      if constexpr (kHasRest) sum += rest[0][i] + rest[1][i], rest[0][i] = rest[1][i] = 0.f;
      accumulators[i] = fmaf(block.scale(i / 2, s), sum, accumulators[i]);
      c[0][i] = c[1][i] = 0.f;
    }
  }
}

}  // namespace hf_fastpath
