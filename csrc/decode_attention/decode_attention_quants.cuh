// What: as decode_attention_mma.cuh, over K and V in int8 or fp8 with a bfloat16 scale a head and
//   position, of q in a 16-bit type. Scores, softmax and accumulators are float32. Where the newest positions
//   are still float32, in DecodeAttentionParams::new_k and new_v, they are quantized and appended on the way.
//   int8 K: its bytes are an operand as they lie, q is two bytes a value, in steps of 2^-15 of its row's
//   largest. fp8 K, and V, are widened to float16, exactly. The weights of V, rounded to float16, take V's
//   scales, over a power of two that the warp's accumulators are multiples of and that grows with the scales,
//   as the maximum does with the scores: so they neither vanish nor overflow.
// Work split: grid (splits, KV heads * row blocks, batch rows), see split.cuh. A block takes one chunk of
//   positions and 8 or 16 rows, that is queries of the KV head's group of heads; its warps take tiles of
//   32 positions in turn, each through a ring of tiles of its own in shared memory, which bulk copies
//   fill on Hopper. What is not new is asked for before the kernel in front is complete. A lane's scores
//   are those of eight positions that follow each other: their scales are one load each of K's and V's,
//   and their rows of V are what its part of an operand is made of, bytes of two rows side by side, which
//   more permutes widen.
// Traffic: 2 * positions * (head_dim + 2) bytes a KV head and batch row (again from L2 for more than 16
//   rows), plus splits * rows * (head_dim + 2) * 4 bytes of partial results through L2.
// Roofline: read bandwidth for long caches, memory latency for short ones. 85 % of read bandwidth for
//   131072 positions of 32/8 heads of 128, a call by itself (H200, 2026-11).

#pragma once

#include "common/async.cuh"
#include "common/kv_quants.cuh"
#include "common/mma.cuh"
#include "decode_attention/decode_attention.h"
#include "decode_attention/merge.cuh"
#include "decode_attention/quant_tiles.cuh"
#include "decode_attention/scores.cuh"

namespace hf_fastpath {
namespace {

// Rows of queries as one operand, in the order that a lane's pieces of a K row come in. T: their type in
// memory.
template <class T, class Quant, int kDims, int kHalves>
struct QuantQueries;

// A lane's part of a row of queries, or of zeros: pieces of 16 dims.
template <class T, int kPieces>
__device__ __forceinline__ void load_row(uint4 (&raw)[kPieces][2], const T* row, int q, int head_dim) {
#pragma unroll
  for (int c = 0; c < kPieces; ++c)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int dim = (c * 4 + q) * 16 + i * 8;
      raw[c][i] = row && dim < head_dim ? Chunk<T, 8>::load_l2(row + dim) : make_uint4(0, 0, 0, 0);
    }
}

// Returns the bits of the largest magnitude of a row of which four lanes have a part. They compare as
// magnitudes do, and NaN is the largest.
template <class T, int kPieces>
__device__ __forceinline__ uint32_t row_largest(const uint4 (&raw)[kPieces][2]) {
  uint32_t largest = 0;
  float values[8];
#pragma unroll
  for (int c = 0; c < kPieces; ++c)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Chunk<T, 8>::unpack(raw[c][i], values);
#pragma unroll
      for (int e = 0; e < 8; ++e) largest = max(largest, __float_as_uint(values[e]) & 0x7fffffffu);
    }
  largest = max(largest, __shfl_xor_sync(kAllLanes, largest, 1));
  return max(largest, __shfl_xor_sync(kAllLanes, largest, 2));
}

// Two bytes a value, 256 * high + low.
template <class T, int kDims, int kHalves>
struct QuantQueries<T, int8_t, kDims, kHalves> {
  static constexpr int kPieces = kDims / 64;  // of 16 dims: 4 lanes share a row
  static constexpr float kLargest = 32512.f;  // 127 * 256
  uint32_t high[kHalves][kPieces][4], low[kHalves][kPieces][4];
  float unit[kHalves];  // of a row

  __device__ __forceinline__ void load(int h, const T* row, int q, int head_dim) {
    uint4 raw[kPieces][2];
    load_row<T>(raw, row, q, head_dim);
    const float most = __uint_as_float(row_largest<T>(raw));
    const float factor = fminf(__fdividef(kLargest, most), 0x1p127f);
    unit[h] = most * (1.f / kLargest);
#pragma unroll
    for (int c = 0; c < kPieces; ++c)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float values[8];
        Chunk<T, 8>::unpack(raw[c][i], values);
#pragma unroll
        for (int w = 0; w < 2; ++w) {
          uint32_t upper[4], whole[4];
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            whole[e] =
                __float_as_uint(fmaf(values[4 * w + e], factor, 0x1.8p23f));  // rounded, in the low 16 bits
            upper[e] = whole[e] + 128u;  // its second byte: the nearest multiple of 256
          }
          high[h][c][2 * i + w] = __byte_perm(__byte_perm(upper[0], upper[1], 0x0051),
                                              __byte_perm(upper[2], upper[3], 0x0051), 0x5410);
          low[h][c][2 * i + w] = __byte_perm(__byte_perm(whole[0], whole[1], 0x0040),
                                             __byte_perm(whole[2], whole[3], 0x0040), 0x5410);
        }
      }
  }

  struct Accumulators {
    int of[kHalves][4] = {};
  };
  __device__ __forceinline__ void add(Accumulators& accumulators, int c, uint4 k) const {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      mma_bytes<true>(accumulators.of[h], high[h][c][0], low[h][c][0], high[h][c][1], low[h][c][1], k.x, k.y);
      mma_bytes<true>(accumulators.of[h], high[h][c][2], low[h][c][2], high[h][c][3], low[h][c][3], k.z, k.w);
    }
  }
  // Sum of row h * 8 + g and position i of the group, in units of unit[h].
  __device__ __forceinline__ float sum(const Accumulators& accumulators, int h, int i) const {
    return static_cast<float>(accumulators.of[h][i] * 256 + accumulators.of[h][2 + i]);
  }
};

// float16; a row of bfloat16 over a power of two that its largest value is less than twice of.
template <class T, int kDims, int kHalves>
struct QuantQueries<T, Float8, kDims, kHalves> {
  static constexpr int kPieces = kDims / 64;
  uint32_t pairs[kHalves][kPieces][8];
  float unit[kHalves];

  __device__ __forceinline__ void load(int h, const T* row, int q, int head_dim) {
    uint4 raw[kPieces][2];
    load_row<T>(raw, row, q, head_dim);
    float factor = 1.f;
    unit[h] = 1.f / kFloat8Unit;
    if constexpr (!std::is_same_v<T, __half>) {
      // The power is from 2^-100 to 2^100, so that both have an inverse.
      const uint32_t exponent = min(max(row_largest<T>(raw) >> 23, 27u), 227u);
      unit[h] *= __uint_as_float(exponent << 23), factor = __uint_as_float((254u - exponent) << 23);
    }
#pragma unroll
    for (int c = 0; c < kPieces; ++c)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t words[4] = {raw[c][i].x, raw[c][i].y, raw[c][i].z, raw[c][i].w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          if constexpr (std::is_same_v<T, __half>) {
            pairs[h][c][4 * i + w] = words[w];
          } else {
            const float2 two = unpack2(words[w], T());
            pairs[h][c][4 * i + w] = pack2(two.x * factor, two.y * factor, __half());
          }
        }
      }
  }

  struct Accumulators {
    float of[4] = {};
  };
  __device__ __forceinline__ void add(Accumulators& accumulators, int c, uint4 k) const {
    const uint32_t words[4] = {k.x, k.y, k.z, k.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      mma<__half>(accumulators.of, pairs[0][c][2 * w], kHalves > 1 ? pairs[kHalves - 1][c][2 * w] : 0u,
                  pairs[0][c][2 * w + 1], kHalves > 1 ? pairs[kHalves - 1][c][2 * w + 1] : 0u,
                  float8_pair<false>(words[w]), float8_pair<true>(words[w]));
    }
  }
  __device__ __forceinline__ float sum(const Accumulators& accumulators, int h, int i) const {
    return accumulators.of[2 * h + i];
  }
};

// kDims: head_dim rounded up to 64, 128 or 256. kHalves: 1 for 8 rows a block, 2 for 16.
template <class T, class Quant, int kDims, int kHalves, int kWarps, int kRing>
__global__ void __launch_bounds__(kWarps* kWarpSize, 1)
    decode_attention_quants_kernel(DecodeAttentionParams p) {
  constexpr int kRows = kHalves * 8, kPieces = kDims / 64;
  constexpr int kValues = kDims > 64 ? 16 : 8;  // dims of V a lane takes of a block of eight times as many
  constexpr int kBlocks = kDims / (8 * kValues);
  constexpr int kStep = kWarps * kQuantTile;
  using Tiles = QuantTiles<kDims, kRing>;
  using Results = WarpResults<kWarps, kDims>;
  using Queries = QuantQueries<T, Quant, kDims, kHalves>;
  static_assert(Results::bytes(kRows) <= Tiles::kBytes, "a warp's result replaces its tiles");
  extern __shared__ __align__(128) char shared[];  // bulk copies to other addresses are slower

  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int g = lane / 4, q = lane % 4;  // as in common/mma.cuh
  const int batch_row = blockIdx.z, row_block = divide(blockIdx.y, p.num_kv_heads_inverse);
  const int kv_head = blockIdx.y - row_block * p.num_kv_heads;
  const Rows rows{row_block * kRows, kRows};

  allow_next_kernel();
  const auto s =
      find_split<false, kQuantTile>(p, batch_row, kv_head, blockIdx.x, gridDim.x, kRing * kStep, 1);
  if (int(blockIdx.x) >= s.active) return;
  const int newest = s.seq_len - p.query_len;  // positions from it on are new
  const int stored = p.new_k ? min(s.end, newest) : s.end;

  __shared__ __align__(8) uint64_t barriers[kWarps][kRing];
  Tiles tiles(p, shared + warp * Tiles::kBytes, barriers[warp], lane, stored);
  QuantScales<Quant> scales(p, s, batch_row, kv_head);
  int base = s.begin + warp * kQuantTile;
  bool waited = false;
#pragma unroll 1
  for (int stage = 0; stage < kRing; ++stage) {
    const int from = base + stage * kStep;
    if (!waited && !p.new_k && min(from + kQuantTile, s.end) > newest) {
      wait_for_previous_kernel();
      waited = true;
    }
    tiles.fetch(s, from, stage);
    if (stage == 0) scales.fetch(s, base + 8 * q, stored);
  }
  if (!waited) wait_for_previous_kernel();
  NewPosition<kDims> new_position;  // the first, of the warp that takes its tile
  if (p.new_k && newest >= base && newest < s.end && (newest - base) % kStep < kQuantTile)
    new_position.load(p, batch_row, kv_head, 0, lane);

  Queries queries;
  int row_first[kHalves], row_last[kHalves];  // positions rows g and g + 8 see
  float of_scores[kHalves], slope[kHalves];
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    const int row = h * 8 + g;
    const bool present = row < rows.count(p);
    const RowPlace place = row_place(p, s, kv_head, present ? rows.first + row : 0);
    row_last[h] = present ? min(newest + place.token, s.end - 1) : -1;
    row_first[h] = s.first_visible(newest + place.token, p.window);
    const T* at = static_cast<const T*>(p.q) + out_offset(p, batch_row, place);  // q lies like the output
    if (base < s.end)
      queries.load(h, present ? at : nullptr, q, p.head_dim);  // some of a short cache's warps are idle
    of_scores[h] = queries.unit[h] * (p.scale * kLog2e);
    slope[h] = slope_of(p, batch_row, place.head);
  }
  const int all_from = s.first_visible(s.seq_len - 1, p.window),
            all_to = min(s.end, newest + 1);  // every row sees

  float max_score[kHalves], sum[kHalves];  // max: of the row; sum: of this lane's positions
  float acc[kBlocks][kValues / 2][kHalves][4] =
      {};  // of dims kValues * (8 b + g) + 2 w and the next, rows 2 q and 2 q + 1
#pragma unroll
  for (int h = 0; h < kHalves; ++h) max_score[h] = -INFINITY, sum[h] = 0.f;

  trace(TracePoint::kReady);
  int stage = 0;
#pragma unroll 1
  for (; base < s.end; base += kStep) {
    tiles.wait(s, base, stage);
    if (p.new_k && base + kQuantTile > newest) {
      append_new<Quant>(p, s, tiles, scales, new_position, stage, base, batch_row, kv_head, row_block == 0);
    }
    typename Queries::Accumulators accumulators[4];  // of positions base + 8 q + 2 t and the next
#pragma unroll
    for (int t = 0; t < 4; ++t)
#pragma unroll
      for (int c = 0; c < kPieces; ++c) queries.add(accumulators[t], c, tiles.k(stage, t, c));

    float k_scales[8], v_factors[8];
    if (scales.grows()) {  // in some lane, and rarely after the first steps
      const float shrink = scales.grow();
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
#pragma unroll
        for (int w = 0; w < kValues / 2; ++w)
#pragma unroll
          for (int h = 0; h < kHalves; ++h)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[b][w][h][i] *= shrink;
    }
    scales.unpack(k_scales, v_factors);
    scales.fetch(s, base + kStep + 8 * q, stored);  // the next tile's
    const bool whole = base >= all_from && base + kQuantTile <= all_to;

    uint32_t weights[kHalves][2][2];  // the B operands of the second product: the layout scores come in
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      float w[8];
      float max = -INFINITY;
#pragma unroll
      for (int j = 0; j < 8; ++j)
        w[j] =
            changed_score<false>(p, queries.sum(accumulators[j / 2], h, j % 2) * (k_scales[j] * of_scores[h]),
                                 slope[h], base + 8 * q + j, s.seq_len);
      if (!whole) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const int position = base + 8 * q + j;
          if (position > row_last[h] || position < row_first[h]) w[j] = -INFINITY;
        }
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) max = fmaxf(max, w[j]);
      if (__any_sync(kAllLanes, max > max_score[h])) {  // rarely after the first steps
        max = fmaxf(max_score[h], max);
        max = fmaxf(max, __shfl_xor_sync(kAllLanes, max, 1));  // the row's four lanes
        max = fmaxf(max, __shfl_xor_sync(kAllLanes, max, 2));
        const float shrink = exp2_below(max_score[h], max);
        max_score[h] = max;
        sum[h] *= shrink;
        const float even = __shfl_sync(kAllLanes, shrink, 8 * q),
                    odd = __shfl_sync(kAllLanes, shrink, 8 * q + 4);
#pragma unroll
        for (int b = 0; b < kBlocks; ++b)
#pragma unroll
          for (int v = 0; v < kValues / 2; ++v) {
            acc[b][v][h][0] *= even, acc[b][v][h][1] *= odd;
            acc[b][v][h][2] *= even, acc[b][v][h][3] *= odd;
          }
      }
      const float below = max_score[h] == -INFINITY ? 0.f : max_score[h];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        w[j] = exp2_approx(w[j] - below);
        sum[h] += w[j];
        w[j] *= v_factors[j];
      }
#pragma unroll
      for (int u = 0; u < 2; ++u)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          weights[h][u][i] = pack2(w[4 * u + 2 * i], w[4 * u + 2 * i + 1], __half());
    }

    uint32_t read = 0;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        uint32_t row[4][kValues / 4];
#pragma unroll
        for (int i = 0; i < 4; ++i) tiles.v(stage, 4 * u + i, b, row[i]);
#pragma unroll
        for (int word = 0; word < kValues / 4; ++word)
#pragma unroll
          for (int upper = 0; upper < 2; ++upper) {
            // Two dims of the four rows: bytes of a pair of rows alternate.
            const uint32_t order = upper ? 0x7362 : 0x5140;
            const uint32_t first = biased<Quant>(__byte_perm(row[0][word], row[1][word], order)),
                           second = biased<Quant>(__byte_perm(row[2][word], row[3][word], order));
            const uint32_t a0 = half_pair<Quant, false>(first), a1 = half_pair<Quant, true>(first),
                           a2 = half_pair<Quant, false>(second), a3 = half_pair<Quant, true>(second);
#pragma unroll
            for (int h = 0; h < kHalves; ++h) {
              mma<__half>(acc[b][2 * word + upper][h], a0, a1, a2, a3, weights[h][u][0], weights[h][u][1]);
            }
          }
      }
      read ^= __float_as_uint(acc[b][0][0][0]);
    }
    tiles.done(p, read);
    __syncwarp();  // every lane has read the tile
    tiles.fetch(s, base + kRing * kStep, stage);
    stage = stage + 1 == kRing ? 0 : stage + 1;
  }

  trace(TracePoint::kSums);
  const Results results{shared, Tiles::kBytes};
  const float of_accumulators = scales.of_accumulators();
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    const int row = h * 8 + g;
    sum[h] += __shfl_xor_sync(kAllLanes, sum[h], 1);
    sum[h] += __shfl_xor_sync(kAllLanes, sum[h], 2);
    if (q == 0) results.max_sums(warp)[row] = make_float2(max_score[h], sum[h]);
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      float* out = results.outputs(warp) + (h * 8 + 2 * q + odd) * kDims + g * kValues;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
#pragma unroll
        for (int w = 0; w < kValues / 2; ++w) {
          *reinterpret_cast<float2*>(out + b * 8 * kValues + 2 * w) =
              make_float2(acc[b][w][h][odd] * of_accumulators, acc[b][w][h][odd + 2] * of_accumulators);
        }
    }
  }
  finish_block<T, true>(p, s, results, batch_row, kv_head, rows);
  trace(TracePoint::kEnd);
}

}  // namespace
}  // namespace hf_fastpath
