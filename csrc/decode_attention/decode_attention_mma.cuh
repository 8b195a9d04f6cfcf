// What: softmax(scale * q @ K.T) @ V of 1 to 16 new tokens over the visible positions of a KV cache, in one
//   pass, on tensor cores, for q, K and V in the same 16-bit type. Scores, softmax and sums are float32; the
//   weights of V are rounded to 16 bits, as in every flash attention. See decode_attention_quants.cuh for
//   quantized caches.
// Work split: grid (splits, KV heads * row blocks, batch rows), see split.cuh. A block takes one chunk of
//   positions and 8 or 16 rows, that is queries of the KV head's group of heads; its warps take tiles of 16
//   positions in turn, each through a ring of tiles of its own in shared memory: asynchronous copies keep
//   kStages - 1 to kStages tiles a warp under way without a register, and no warp waits for another. Heads of
//   65 to 128 on Hopper come by bulk copies, a tile of K or V each (BulkTiles); others by 16-byte copies,
//   whose pieces of a row are permuted so that reads meet no bank conflicts (CopiedTiles; see kIsBulk). What
//   is not new is asked for before the kernel in front is complete. For the scores, queries are the A operand
//   and a lane's 16 bytes of a K row serve two k-steps; for the outputs, V is the A operand, 16 bytes of each
//   of four rows paired by byte permutes, and the weights of V are the B operand in the very registers where
//   the scores came out.
// Traffic: 2 * positions * head_dim * 2 bytes a KV head and batch row (again from L2 for more than 16 rows),
//   plus splits * rows * (head_dim + 2) * 4 bytes of partial results through L2.
// Roofline: read bandwidth for long caches, memory latency for short ones.

#pragma once

#include "common/async.cuh"
#include "common/mma.cuh"
#include "decode_attention/decode_attention.h"
#include "decode_attention/merge.cuh"
#include "decode_attention/scores.cuh"
#include "decode_attention/tiles.cuh"

namespace hf_fastpath {
namespace {

// Warps of a block with head dims rounded up to kDims, where shared memory holds their tiles; half as many
// else. Seven warps of long heads hold 224 positions, which then need no merge.
template <int kDims, bool kPaged>
constexpr int kMostWarps = kDims <= 128 ? 8
                           : kPaged     ? 4
                                        : 7;
template <int kDims>
constexpr int kBlocksPerSm = kDims > 64 ? 1 : 2;

// kDims: head_dim rounded up to 64, 128 or 256. kHalves: 1 for 8 rows a block, 2 for 16.
// kPaged: the caches lie in pages. kJoins: see finish_block; few models need its code, which every layer
// would fetch.
template <class T, int kDims, int kHalves, int kWarps, bool kPaged, bool kJoins>
__global__ void __launch_bounds__(kWarps* kWarpSize, 1) decode_attention_mma_kernel(DecodeAttentionParams p) {
  using C = Chunk<T, kElems>;
  constexpr int kRows = kHalves * kHalfRows, kTilesBytes = WarpTiles<T, kDims>::kBytes;
  constexpr int kRing = kStages<kDims>;
  constexpr int kPieces = kDims / 32;  // pieces of a K row a lane takes: 4 lanes share a row
  constexpr int kBlocks = kDims / 64;  // of 64 dims: 8 lanes share a V row's piece of a block
  constexpr int kStep = kWarps * kTile;
  using Results = WarpResults<kWarps, kDims>;
  static_assert(Results::bytes(kRows) <= kTilesBytes, "a warp's result replaces its tiles");
  extern __shared__ __align__(128) char shared[];  // bulk copies to other addresses are slower

  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int g = lane / 4, q = lane % 4;  // as in common/mma.cuh
  const int batch_row = blockIdx.z, row_block = divide(blockIdx.y, p.num_kv_heads_inverse);
  const int kv_head = blockIdx.y - row_block * p.num_kv_heads;
  const Rows rows{row_block * kRows, kRows};

  allow_next_kernel();
  const auto s = find_split<kPaged>(p, batch_row, kv_head, blockIdx.x, gridDim.x, kRing * kStep, sizeof(T));
  if (int(blockIdx.x) >= s.active) return;

  // The first tiles, those with new positions once the kernel in front has appended them.
  __shared__ __align__(8) uint64_t barriers[kWarps][kRing];
  Tiles<T, kDims, kPaged> tiles(p, shared + warp * kTilesBytes, barriers[warp], lane);
  int base = s.begin + warp * kTile;
  bool waited = false;
#pragma unroll 1
  for (int stage = 0; stage < kRing; ++stage) {
    const int from = base + stage * kStep;
    if (!waited && min(from + kTile, s.end) > s.seq_len - p.query_len) {
      tiles.fetch_newest(p, s, from, stage);
      waited = true;
    } else {
      tiles.fetch(p, s, from, stage);
    }
  }
  if (!waited) wait_for_previous_kernel();

  uint4 queries[kHalves][kPieces];  // in K's order of dims
  float slope[kHalves];
  int row_first[kHalves], row_last[kHalves];  // positions rows g and g + 8 see
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    const int row = h * kHalfRows + g;
    const RowPlace place = row_place(p, s, kv_head, row < rows.count(p) ? rows.first + row : 0);
    row_last[h] = row < rows.count(p) ? min(s.seq_len - p.query_len + place.token, s.end - 1) : -1;
    row_first[h] = s.first_visible(s.seq_len - p.query_len + place.token, p.window);
    slope[h] = slope_of(p, batch_row, place.head);
    const T* at = static_cast<const T*>(p.q) + out_offset(p, batch_row, place);  // q lies like the output
#pragma unroll
    for (int c = 0; c < kPieces; ++c) {
      const int dim = c * 32 + q * kElems;
      queries[h][c] = row < rows.count(p) && dim < p.head_dim ? C::load_l2(at + dim) : C::zero();
    }
  }

  float max_score[kHalves], sum[kHalves];  // max: of the row; sum: of this lane's positions
  float acc[kBlocks][kElems / 2][kHalves][4] =
      {};  // of dims 64 b + 8 g + 2 w and the next, rows 2 q and the next
#pragma unroll
  for (int h = 0; h < kHalves; ++h) max_score[h] = -INFINITY, sum[h] = 0.f;

  trace(TracePoint::kReady);
  int stage = 0;
#pragma unroll 1
  for (; base < s.end; base += kStep) {
    tiles.wait(s, base, stage);
    const char *k_tile = tiles.k(stage), *v_tile = tiles.v(stage);
    float scores[kTileGroups][4] = {};  // rows g and g + 8 of positions base + 8 t + 2 q and its neighbor
#pragma unroll
    for (int t = 0; t < kTileGroups; ++t)
#pragma unroll
      for (int c = 0; c < kPieces; ++c) {
        const uint4 k =
            tiles.read(k_tile + tiles.k_at(t * 8 + g, c * 4 + q), (c * 4 + q) * kElems < p.head_dim);
        const uint4 upper = queries[0][c];
        const uint4 lower = kHalves > 1 ? queries[kHalves - 1][c] : C::zero();
        mma<T>(scores[t], upper.x, lower.x, upper.y, lower.y, k.x, k.y);
        mma<T>(scores[t], upper.z, lower.z, upper.w, lower.w, k.z, k.w);
      }

    uint32_t weights[kHalves][2];  // the B operand of the second product: the layout scores come in
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      float w[kTileGroups][2];
      float max = max_score[h];
#pragma unroll
      for (int t = 0; t < kTileGroups; ++t)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int position = base + t * 8 + 2 * q + i;
          const bool visible = position <= row_last[h] && position >= row_first[h];
          const float score = scores[t][2 * h + i] * (p.scale * kLog2e);
          w[t][i] = visible ? changed_score<false>(p, score, slope[h], position, s.seq_len) : -INFINITY;
          max = fmaxf(max, w[t][i]);
        }
      max = fmaxf(max, __shfl_xor_sync(kAllLanes, max, 1));  // the row's four lanes
      max = fmaxf(max, __shfl_xor_sync(kAllLanes, max, 2));
      const float shrink = exp2_below(max_score[h], max);
      if (__any_sync(kAllLanes, max > max_score[h])) {  // rarely after the first steps
        sum[h] *= shrink;
        const float even = __shfl_sync(kAllLanes, shrink, 8 * q),
                    odd = __shfl_sync(kAllLanes, shrink, 8 * q + 4);
#pragma unroll
        for (int b = 0; b < kBlocks; ++b)
#pragma unroll
          for (int w = 0; w < kElems / 2; ++w) {
            acc[b][w][h][0] *= even, acc[b][w][h][1] *= odd;
            acc[b][w][h][2] *= even, acc[b][w][h][3] *= odd;
          }
      }
      max_score[h] = max;
#pragma unroll
      for (int t = 0; t < kTileGroups; ++t) {
        w[t][0] = exp2_below(w[t][0], max);
        w[t][1] = exp2_below(w[t][1], max);
        sum[h] += w[t][0] + w[t][1];
        weights[h][t] = pack2(w[t][0], w[t][1], T());
      }
    }

#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      uint32_t words[4][4];
#pragma unroll
      for (int t = 0; t < kTileGroups; ++t)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint4 v = tiles.read(v_tile + tiles.v_at(t * 8 + 2 * q + i, b * 8 + g),
                                     (b * 8 + g) * kElems < p.head_dim);
          uint32_t (&row)[4] = words[2 * t + i];
          row[0] = v.x, row[1] = v.y, row[2] = v.z, row[3] = v.w;
        }
#pragma unroll
      for (int w = 0; w < kElems / 2; ++w)
#pragma unroll
        for (int h = 0; h < kHalves; ++h) {
          mma_columns<T>(acc[b][w][h], words[0][w], words[1][w], words[2][w], words[3][w], weights[h][0],
                         weights[h][1]);
        }
    }
    uint32_t sums = 0;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) sums ^= __float_as_uint(acc[b][0][0][0]);
    tiles.done(p, sums);
    __syncwarp();  // every lane has read the tile
    tiles.fetch(p, s, base + kRing * kStep, stage);
    stage = stage + 1 == kRing ? 0 : stage + 1;
  }

  trace(TracePoint::kSums);
  const Results results{shared, kTilesBytes};
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    const int row = h * kHalfRows + g;
    sum[h] += __shfl_xor_sync(kAllLanes, sum[h], 1);
    sum[h] += __shfl_xor_sync(kAllLanes, sum[h], 2);
    if (q == 0) results.max_sums(warp)[row] = make_float2(max_score[h], sum[h]);
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      float* out = results.outputs(warp) + (h * kHalfRows + 2 * q + odd) * kDims + g * kElems;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
#pragma unroll
        for (int w = 0; w < kElems / 2; ++w) {
          *reinterpret_cast<float2*>(out + b * 64 + 2 * w) =
              make_float2(acc[b][w][h][odd], acc[b][w][h][odd + 2]);
        }
    }
  }
  finish_block<T, kJoins>(p, s, results, batch_row, kv_head, rows);
  trace(TracePoint::kEnd);
}

template <class T, int kDims, int kHalves, int kWarps, bool kPaged>
void launch_warps(const DecodeAttentionParams& p, cudaStream_t stream) {
  const dim3 grid = split_grid(p, kHalves * kHalfRows, kBlocksPerSm<kDims>), block(kWarps * kWarpSize);
  const size_t smem_bytes = kWarps * WarpTiles<T, kDims>::kBytes;
  const auto start = [&](auto kernel) { launch_attention(kernel, grid, block, smem_bytes, stream, p); };
  if (p.other || p.lse) return start(decode_attention_mma_kernel<T, kDims, kHalves, kWarps, kPaged, true>);
  start(decode_attention_mma_kernel<T, kDims, kHalves, kWarps, kPaged, false>);
}

template <class T, bool kPaged, int kDims, int kHalves, int kWarps = kMostWarps<kDims, kPaged>>
void launch(const DecodeAttentionParams& p, cudaStream_t stream) {
  constexpr int kBytes = kWarps * WarpTiles<T, kDims>::kBytes;
  if constexpr (kBytes > kSharedBytesEverywhere) {
    if (kBytes > shared_bytes_of_block())
      return launch<T, kPaged, kDims, kHalves, (kWarps + 1) / 2>(p, stream);
  }
  launch_warps<T, kDims, kHalves, kWarps, kPaged>(p, stream);
}

template <class T, bool kPaged = false>
void launch_typed(const DecodeAttentionParams& p, cudaStream_t stream) {
  const bool few = rows_per_kv_head(p) <= kHalfRows;
  if (p.head_dim <= 64)
    return few ? launch<T, kPaged, 64, 1>(p, stream) : launch<T, kPaged, 64, 2>(p, stream);
  if (p.head_dim <= 128)
    return few ? launch<T, kPaged, 128, 1>(p, stream) : launch<T, kPaged, 128, 2>(p, stream);
  launch<T, kPaged, 256, 1>(p, stream);  // 16 rows would not fit in registers
}

}  // namespace
}  // namespace hf_fastpath
