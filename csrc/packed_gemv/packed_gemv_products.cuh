// Products of blocks of quants with x, for packed_gemv_ring.cuh.
#pragma once

#include "packed_gemv/packed_gemv_reader.cuh"
#include "packed_gemv/packed_gemv_x.cuh"

namespace hf_fastpath {

template <int kColumns>
constexpr int kColumnTiles = (kColumns + 7) / 8;

template <int kColumns>
using PackedSums =
    float[2][kColumnTiles<kColumns>][2];  // rows g and g + 8; columns 2 q and 2 q + 1 of a tile

// A lane's words of a block, of rows g and g + 8: word s of 16 bytes is of stretch s.
template <PackedForm kForm>
struct BlockWords {
  static constexpr int kLoads = kBits<kForm> / 4;
  uint32_t word[2][kLoads][4];

  __device__ __forceinline__ void load(const PackedReader<kForm>& reader, const TileRows& rows, int block) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const uint4 raw = reader.quants(rows, h, block, i);
        word[h][i][0] = raw.x, word[h][i][1] = raw.y, word[h][i][2] = raw.z, word[h][i][3] = raw.w;
      }
  }

  // c += the products of a stretch and x. `zero`: of both rows, for centered quants.
  template <bool kCentered = false>
  __device__ __forceinline__ void add(float (&c)[4], int stretch, const uint4& x,
                                      const int (&zero)[2] = {}) const {
    uint32_t a[2][2][2];  // rows; the two products; low and high k
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if constexpr (kLoads == 1) {
        const Quants<kForm, kCentered> quants(word[h][0][stretch], zero[h]);
        a[h][0][0] = quants.pair[0][0], a[h][0][1] = quants.pair[0][1];
        a[h][1][0] = quants.pair[1][0], a[h][1][1] = quants.pair[1][1];
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const Quants<kForm, kCentered> quants(word[h][i][stretch], zero[h]);
          a[h][i][0] = quants.pair[0][0], a[h][i][1] = quants.pair[0][1];
        }
      }
    }
    mma<__half>(c, a[0][0][0], a[1][0][0], a[0][0][1], a[1][0][1], x.x, x.y);
    mma<__half>(c, a[0][1][0], a[1][1][0], a[0][1][1], a[1][1][1], x.z, x.w);
  }
};

// Adds a block's products. `block`: of this warp's in the piece; `of_x`: of those in the phase.
template <class T, PackedForm kForm, int kColumns>
__device__ __forceinline__ void add_block(const PackedReader<kForm>& reader, const TileRows& rows,
                                          const WarpX<T, kForm, kColumns>& x, int block, int of_x,
                                          PackedSums<kColumns>& sums) {
  using Slot = PackedSlot<kForm>;
  const int lane = threadIdx.x % kWarpSize, g = lane / 4, q = lane % 4;
  constexpr int kTiles = kColumnTiles<kColumns>, kGroups = kForm == PackedForm::kInt4G32 ? 4 : 1;
  constexpr bool kFloats = kForm == PackedForm::kFp8;
  BlockWords<kForm> words;
  words.load(reader, rows, block);
  constexpr bool kCentered = kCenters<T>;
  float scale[2][kGroups];
  int zero[2] = {8, 8};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if constexpr (!kFloats) {
      const uint2 raw = reader.scales(rows, h, block);
      const float2 low = unpack2(raw.x, __half());
      scale[h][0] = low.x;
      if constexpr (kGroups == 4) {
        const float2 high = unpack2(raw.y, __half());
        scale[h][1] = low.y, scale[h][2] = high.x, scale[h][3] = high.y;
      }
    }
    if constexpr (kForm == PackedForm::kInt4) zero[h] = reader.zero(rows, h, block);
  }
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    // Columns that do not exist are others once more: nobody reads their sums.
    const uint4* operand =
        x.operands +
        (of_x * int(kStretches) * kColumns + (kColumns >= 8 || g < kColumns ? t * 8 + g : 0)) * 4 + q;
    const int column = kColumns >= 8 || 2 * q < kColumns ? t * 8 + 2 * q : 0;
    const float* of_column = x.sums + (of_x * kColumns + column) * Slot::kSums;
    float c[2][4] = {};  // of even and odd stretches
#pragma unroll
    for (int s = 0; s < int(kStretches); ++s) {
      words.template add<kCentered>(c[s % 2], s, load_shared(shared_address(operand + s * kColumns * 4)),
                                    zero);
      if constexpr (kGroups == 4) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float all = kCentered ? c[s % 2][i] : c[s % 2][i] + of_column[i % 2 * Slot::kSums + s];
          sums[i / 2][t][i % 2] = fmaf(scale[i / 2][s], all, sums[i / 2][t][i % 2]);
          c[s % 2][i] = 0.f;
        }
      }
    }
    if constexpr (kGroups == 1) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float all = c[0][i] + c[1][i];
        float& sum = sums[i / 2][t][i % 2];
        if constexpr (kFloats) {
          sum += all;
        } else if constexpr (kCentered) {
          sum = fmaf(scale[i / 2][0], all, sum);
        } else {
          const float excess = of_column[i % 2];
          all = kForm == PackedForm::kInt4 ? fmaf(float(zero[i / 2]), excess, all) : all + excess;
          sum = fmaf(scale[i / 2][0], all, sum);
        }
      }
    }
  }
}

#if HF_FASTPATH_HOPPER

// The same for a warp's two blocks of kInt4G32 and one column: each lane's operand is of another stretch of
// them, column n of B being stretch n, and of each product the column of its own stretch counts. A lane of a
// quad ends up with the sums over two stretches; `operand`, `x_sums`: its own, of x.
__device__ __forceinline__ void add_two_blocks(const PackedReader<PackedForm::kInt4G32>& reader,
                                               uint32_t operand, uint32_t x_sums, float (&sums)[2]) {
  const int q = threadIdx.x % 4;
  BlockWords<PackedForm::kInt4G32> words[2];
  words[0].load(reader, {}, 0);
  words[1].load(reader, {}, 1);
  const uint4 x = load_shared(operand);
  float2 excess, scale[2];
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(excess.x), "=f"(excess.y) : "r"(x_sums));
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    uint32_t bits;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(bits) : "r"(reader.slot + reader.scales_at[h] + 4 * q));
    scale[h] = unpack2(bits, __half());
  }
  float c[8][4] = {};
#pragma unroll
  for (int n = 0; n < 8; ++n) words[n / 4].add(c[n], n % 4, x);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const auto own = [&](int at) {  // of stretch 2 q or the next
      const float first = q % 2 ? c[2 + at % 2][at] : c[at % 2][at];
      const float second = q % 2 ? c[6 + at % 2][at] : c[4 + at % 2][at];
      return q / 2 ? second : first;
    };
    sums[h] = fmaf(scale[h].x, own(2 * h) + excess.x, sums[h]);
    sums[h] = fmaf(scale[h].y, own(2 * h + 1) + excess.y, sums[h]);
  }
}

#endif

}  // namespace hf_fastpath
