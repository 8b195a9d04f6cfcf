// Which queries a block of append_attention has, which positions they see, and the softmax over them.
//
// A "row" is one query of one head; the rows of a KV head are its group's heads of the first token, those of
// the second, and so on. A block takes a tile of them, neighbors, and a chunk of the positions they see.
#pragma once

#include <cfloat>

#include "append_attention/append_attention.h"
#include "common/lengths.h"
#include "common/numeric.cuh"
#include "common/softmax.cuh"
#include "common/warp.cuh"

namespace hf_fastpath {
namespace append {

constexpr int kMinChunk = 128;  // positions of a split: fewer cost more in merging than they save

// Positions of a tile on Hopper: two warpgroups of rows need longer tiles to hide their softmax, as registers
// allow.
constexpr int wgmma_positions(int rows, int dims) { return rows == 128 && dims <= 128 ? 128 : 64; }

// The kernel for any device: rows of a tile where there are few, and positions of a tile. With more dims,
// what fits into 99 KiB of shared memory.
constexpr int mma_few_rows(int dims) { return dims > 128 ? 32 : 16; }
constexpr int mma_positions(int dims) { return dims > 128 ? 32 : 64; }

__host__ __device__ inline int rows_per_kv_head(const AppendAttentionParams& p) {
  return p.group * p.query_len;
}

struct RowTile {
  int batch_row, kv_head, unit;  // unit: number of the tile among all
  int first_row, rows;           // of the KV head's rows
  int seq_len, start, past;      // past: position of the first new token
  int first, end;                // positions that some row of the tile sees
  int all_first, all_end;        // positions that every row of the tile sees
  int begin, stop;               // positions of this block
  int split, active;             // this block's number; blocks of this tile that have work, at least 1

  // First position that the token at `position` sees.
  __device__ __forceinline__ int first_visible(const AppendAttentionParams& p, int position) const {
    return p.window > 0 ? max(start, position - p.window + 1) : start;
  }
};

// Positions of a row of the batch, all of which have a slot.
__device__ __forceinline__ int length_of(const AppendAttentionParams& p, int batch_row) {
  return bounded_length(__ldg(p.seq_lens + batch_row), static_cast<int>(p.capacity));
}

// Tile number `unit` of all: tiles of a KV head are neighbors, then KV heads, then rows of the batch.
__device__ __forceinline__ RowTile find_row_tile(const AppendAttentionParams& p,
                                                 const AppendAttentionPlan& plan, int unit, int split) {
  RowTile t;
  const int all_rows = rows_per_kv_head(p), tiles = (all_rows + plan.rows - 1) / plan.rows;
  const int head = unit / tiles;
  t.unit = unit;
  t.batch_row = head / p.num_kv_heads;
  t.kv_head = head - t.batch_row * p.num_kv_heads;
  t.first_row = (unit - head * tiles) * plan.rows;
  t.rows = min(plan.rows, all_rows - t.first_row);
  t.seq_len = length_of(p, t.batch_row);
  t.start = p.starts ? max(__ldg(p.starts + t.batch_row), 0) : 0;
  t.past = t.seq_len - p.query_len;
  const int first_token = t.past + t.first_row / p.group,
            last_token = t.past + (t.first_row + t.rows - 1) / p.group;
  t.first = bounded_length(t.first_visible(p, first_token), t.seq_len);  // a start may be any number
  t.end = last_token + 1;
  t.all_first = t.first_visible(p, last_token);
  t.all_end = first_token + 1;
  const int length = max(t.end - t.first, 0);
  int chunk = max((length + plan.splits - 1) / plan.splits, kMinChunk);
  chunk = (chunk + plan.positions - 1) / plan.positions * plan.positions;
  t.active = max((length + chunk - 1) / chunk, 1);
  t.split = split;
  t.begin = t.first + t.split * chunk;
  t.stop = min(t.begin + chunk, t.end);
  return t;
}

// This block's, in a grid (splits, KV heads * tiles of rows, batch rows). The last tiles of rows, which see
// the most, come first.
__device__ __forceinline__ RowTile block_row_tile(const AppendAttentionParams& p,
                                                  const AppendAttentionPlan& plan) {
  const int tiles = (rows_per_kv_head(p) + plan.rows - 1) / plan.rows;
  const int head = blockIdx.y / tiles, tile = tiles - 1 - (blockIdx.y - head * tiles);
  return find_row_tile(p, plan, (blockIdx.z * p.num_kv_heads + head) * tiles + tile, blockIdx.x);
}

// A row's place, and what it sees.
struct RowPlace {
  int token, head;
  int first, last;  // positions; first > last: none
};

__device__ __forceinline__ RowPlace row_place(const AppendAttentionParams& p, const RowTile& t, int row) {
  RowPlace place;
  const int of_head = t.first_row + row;
  place.token = of_head / p.group;
  place.head = t.kv_head * p.group + of_head - place.token * p.group;
  place.last = t.past + place.token;
  place.first = max(t.first_visible(p, place.last), 0);
  return place;
}

// Offset of a row in q and in the output.
__device__ __forceinline__ int64_t row_offset(const AppendAttentionParams& p, const RowTile& t,
                                              const RowPlace& place) {
  return (int64_t(t.batch_row * p.query_len + place.token) * p.num_heads + place.head) * p.head_dim;
}

// Scores are taken as products of q and k, or with a soft cap as tanh(score / softcap): numbers that, times
// `factor`, which is positive, are exponents of 2.
struct ScoreScale {
  float factor;
  float into_tanh;  // 0: no cap
  bool negates;     // q was to be negated: `scale` is negative

  __device__ __forceinline__ explicit ScoreScale(const AppendAttentionParams& p) {
    const float scale = fmaxf(fabsf(p.scale), FLT_MIN);  // 0 times -inf is no number
    negates = p.scale < 0.f;
    into_tanh = p.softcap > 0.f ? scale / p.softcap : 0.f;
    factor = (p.softcap > 0.f ? p.softcap : scale) * kLog2e;
  }
};

// The error is at most 1e-7, absolute.
__device__ __forceinline__ float tanh_fast(float x) {
  return 1.f - __fdividef(2.f, 1.f + exp2_approx(2.f * kLog2e * x));
}

// Online softmax of the 16 rows of a warp, of which a lane has rows g = lane / 4 and g + 8, in scores that
// lie as common/mma.cuh says. `kGroups` groups of 8 positions a step.
template <int kGroups>
struct OnlineSoftmax {
  float max_score[2], sum[2];  // sum: of this lane's positions
  int first[2], last[2];       // positions the rows see

  __device__ __forceinline__ OnlineSoftmax(const AppendAttentionParams& p, const RowTile& t, int row) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      max_score[h] = -INFINITY, sum[h] = 0.f;
      const RowPlace place = row_place(p, t, min(row + 8 * h, t.rows - 1));
      first[h] = place.first, last[h] = place.last;
    }
  }

  // Turns the scores of positions `base` and following into weights. What was summed before is to be
  // multiplied by `shrink`; the result says whether that is not 1 in some lane of the warp.
  __device__ __forceinline__ bool step(float (&s)[kGroups][4], float (&shrink)[2], const ScoreScale& scale,
                                       const RowTile& t, int base) {
    const int lane_first = base + threadIdx.x % 4 * 2;
    if (scale.into_tanh > 0.f) {
#pragma unroll
      for (int n = 0; n < kGroups; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] = tanh_fast(s[n][i] * scale.into_tanh);
    }
    if (base < t.all_first || base + 8 * kGroups > t.all_end) {
#pragma unroll
      for (int n = 0; n < kGroups; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int position = lane_first + n * 8 + i % 2;
          if (position < first[i / 2] || position > last[i / 2]) s[n][i] = -INFINITY;
        }
    }
    bool grew = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float max = max_score[h];
#pragma unroll
      for (int n = 0; n < kGroups; ++n) max = fmaxf(max, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
      max = fmaxf(max, __shfl_xor_sync(kAllLanes, max, 1));  // the row's four lanes
      max = fmaxf(max, __shfl_xor_sync(kAllLanes, max, 2));
      const float top = max == -INFINITY ? 0.f : max * scale.factor;
      shrink[h] = exp2_approx(fmaf(max_score[h], scale.factor, -top));
      grew = grew || max > max_score[h];
      max_score[h] = max;
      float total = 0.f;
#pragma unroll
      for (int n = 0; n < kGroups; ++n)
#pragma unroll
        for (int i = 2 * h; i < 2 * h + 2; ++i) {
          s[n][i] = exp2_approx(fmaf(s[n][i], scale.factor, -top));
          total += s[n][i];
        }
      sum[h] = fmaf(sum[h], shrink[h], total);
    }
    return __any_sync(kAllLanes, grew);
  }

  // Maximum, as an exponent of 2, and sum of the weights, the same in a row's lanes.
  __device__ __forceinline__ float2 result(int h, const ScoreScale& scale) const {
    float total = sum[h];
    total += __shfl_xor_sync(kAllLanes, total, 1);
    total += __shfl_xor_sync(kAllLanes, total, 2);
    return make_float2(max_score[h] == -INFINITY ? -INFINITY : max_score[h] * scale.factor, total);
  }
};

// Weights as A operands of kGroups / 2 steps.
template <class T, int kGroups>
__device__ __forceinline__ void pack_weights(const float (&s)[kGroups][4],
                                             uint32_t (&weights)[kGroups / 2][4]) {
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
    weights[n / 2][n % 2 * 2] = pack2(s[n][0], s[n][1], T());
    weights[n / 2][n % 2 * 2 + 1] = pack2(s[n][2], s[n][3], T());
  }
}

}  // namespace append
}  // namespace hf_fastpath
