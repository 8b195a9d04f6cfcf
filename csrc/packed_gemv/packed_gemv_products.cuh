// Products of blocks of quants with x, for packed_gemv_ring.cuh.
#pragma once

#include "packed_gemv/packed_gemv_reader.cuh"
#include "packed_gemv/packed_gemv_x.cuh"

namespace hf_fastpath {

template <int kColumns>
constexpr int kColumnTiles = (kColumns + 7) / 8;

template <int kColumns>
using PackedSums = float[kColumnTiles<kColumns>][4];  // as C of mma()

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

  // A of a stretch's two products: pairs[product] are a0 to a3. `zero`: of both rows, for centered quants.
  template <bool kCentered>
  __device__ __forceinline__ void operands(uint32_t (&pairs)[2][4], int stretch, const int (&zero)[2]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const Quants<kForm, kCentered> quants(word[h][i][stretch], zero[h]);
#pragma unroll
        for (int step = 0; step < quants.kSteps; ++step) {
          pairs[i + step][h] = quants.pair[step][0], pairs[i + step][h + 2] = quants.pair[step][1];
        }
      }
  }
};

// What quants have in excess times x, in the lane's two columns of tile t; those that do not exist are others
// once more: nobody reads their sums.
template <int kColumns, class X>
__device__ __forceinline__ float2 excess(const X& x, int sum, int t) {
  const int q = threadIdx.x % 4, column = kColumns >= 8 || 2 * q < kColumns ? t * 8 + 2 * q : 0;
  return *reinterpret_cast<const float2*>(x.sums + sum * kColumns + column);
}

// Adds a block's products. `block`: of this warp's in the piece; `of_x`: where x has it.
template <class T, PackedForm kForm, int kColumns, class X>
__device__ __forceinline__ void add_block(const PackedReader<kForm>& reader, const TileRows& rows, const X& x,
                                          int block, int of_x, PackedSums<kColumns>& sums) {
  const int lane = threadIdx.x % kWarpSize, g = lane / 4, q = lane % 4;
  constexpr int kTiles = kColumnTiles<kColumns>;
  constexpr bool kFloats = kForm == PackedForm::kFp8, kCentered = kCenters<T>;
  constexpr bool kEachStretch = kForm == PackedForm::kInt4G32;  // has scales of its own
  BlockWords<kForm> words;
  words.load(reader, rows, block);
  uint2 scales[2];
  int zero[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if constexpr (!kFloats) scales[h] = reader.scales(rows, h, block);
    zero[h] = kForm == PackedForm::kInt4 ? reader.zero(rows, h, block) : 8;
  }
  // Tensor cores cut sums off: those of a float32 x are halves.
  constexpr int kChains = sizeof(T) == 4 ? 2 : 1;
  float c[kChains][kTiles][4] = {};
#pragma unroll
  for (int s = 0; s < int(kStretches); ++s) {
    uint32_t a[2][4];
    words.template operands<kCentered>(a, s, zero);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const int column = kColumns >= 8 || g < kColumns ? t * 8 + g : 0;
      const uint4 b = load_shared(
          shared_address(x.operands + ((of_x * int(kStretches) + s) * kColumns + column) * 4 + q));
      auto& to = c[s % kChains][t];
      if constexpr (kEachStretch && !kCentered) {
        const float2 start = excess<kColumns>(x, of_x * int(kStretches) + s, t);
        to[0] = to[2] = start.x, to[1] = to[3] = start.y;
      }
      mma<__half>(to, a[0][0], a[0][1], a[0][2], a[0][3], b.x, b.y);
      mma<__half>(to, a[1][0], a[1][1], a[1][2], a[1][3], b.z, b.w);
      if constexpr (kEachStretch) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 two = unpack2(s < 2 ? scales[i / 2].x : scales[i / 2].y, __half());
          sums[t][i] = fmaf(s % 2 ? two.y : two.x, to[i], sums[t][i]);
          to[i] = 0.f;
        }
      }
    }
  }
  if constexpr (!kEachStretch) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      float2 over = {};
      if constexpr (!kFloats && !kCentered) over = excess<kColumns>(x, of_x, t);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float all = c[0][t][i];
        if constexpr (kChains == 2) all += c[1][t][i];
        if constexpr (kFloats) {
          sums[t][i] += all;
        } else {
          if constexpr (!kCentered) {
            const float of_column = i % 2 ? over.y : over.x;
            all = kForm == PackedForm::kInt4 ? fmaf(float(zero[i / 2]), of_column, all) : all + of_column;
          }
          sums[t][i] = fmaf(unpack2(scales[i / 2].x, __half()).x, all, sums[t][i]);
        }
      }
    }
  }
}

}  // namespace hf_fastpath
