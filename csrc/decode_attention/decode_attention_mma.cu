// What: softmax(scale * q @ K.T) @ V of 1 to 16 new tokens over the visible positions of a KV cache, in one
//   pass, on tensor cores, for q, K and V in one 16-bit type. Scores, softmax and sums are float32; the
//   weights of V are rounded to 16 bits, as in every flash attention.
// Work split: grid (splits, KV heads * row blocks, batch rows), see split.cuh. A block takes one chunk of
//   positions and 8 or 16 rows, that is queries of the KV head's group of heads; its warps take 16 positions
//   each in turn. For the scores, queries are the A operand and a lane's 16 bytes of a K row serve two
//   k-steps; for the outputs, V is the A operand, 16 bytes of each of four rows paired by byte permutes, and
//   the weights of V are the B operand in the very registers where the scores came out. K and V go from
//   device memory to the tensor cores without shared memory. The next 16 positions' K and V are in flight
//   while these are used.
// Traffic: 2 * positions * head_dim * 2 bytes a KV head and batch row (again from L2 for more than 16 rows),
//   plus splits * rows * (head_dim + 2) * 4 bytes of partial results through L2.
// Roofline: read bandwidth for long caches, memory latency for short ones. float16, 32/8 heads of 128, a call
//   by itself: 55 % of read bandwidth at 131072 positions, 46 % at 32768, 19 % at 4096, 8 % at 1024 (H200,
//   2026-11).

#include <algorithm>

#include "common/async.cuh"
#include "common/mma.cuh"
#include "decode_attention/decode_attention.h"
#include "decode_attention/split.cuh"

namespace hf_fastpath {
namespace {

constexpr int kElems = 8;     // of a 16-byte load
constexpr int kHalfRows = 8;  // rows in each half of the scores, and of a B operand
// Small blocks: one fits beside two of gemv_ring_kernel, which fetch the next weights meanwhile.
constexpr int kWarps = 4;
// Blocks an SM gets: few for large heads, since fewer blocks mean fewer splits to merge.
template <int kDims>
constexpr int kBlocksPerSm = kDims > 128  ? 1
                             : kDims > 64 ? 2
                                          : 3;
// Positions of a warp's step, in groups of 8, which are the n side of the first product. The second product
// has 16 on its k side; for the largest heads K and V of 16 would not fit in registers and half of it stays
// zero.
template <int kDims>
constexpr int kGroups = kDims > 128 ? 1 : 2;

// kDims: head_dim rounded up to 64, 128 or 256. kHalves: 1 for 8 rows a block, 2 for 16.
template <class T, int kDims, int kHalves>
__global__ void __launch_bounds__(kWarps* kWarpSize, 2) decode_attention_mma_kernel(DecodeAttentionParams p) {
  using C = Chunk<T, kElems>;
  constexpr int kRows = kHalves * kHalfRows;
  constexpr int kPieces = kDims / 32;  // 16-byte pieces of a K row a lane takes: 4 lanes share a row
  constexpr int kBlocks = kDims / 64;  // of 64 dims: 8 lanes share a V row's piece of a block
  constexpr int kTile = kGroups<kDims> * 8, kStep = kWarps * kTile;
  extern __shared__ __align__(16) char shared[];

  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int g = lane / 4, q = lane % 4;  // as in common/mma.cuh
  const int batch_row = blockIdx.z, kv_head = blockIdx.y % p.num_kv_heads;
  const Rows rows = block_rows<kRows>(p);
  const int held = min(kRows, rows_per_kv_head(p));

  allow_next_kernel();
  const int split = blockIdx.x, cluster = cluster_size();
  const Split s = find_split(p, batch_row, kv_head, split, gridDim.x, cluster, sizeof(T));
  const bool one_cluster = cluster > 1 && s.active <= cluster;
  if (one_cluster && split < cluster) {
    arrive_cluster();
    if (split >= s.active) {
      return finish_cluster(p, s, Results<kWarps, kDims>(shared, held), batch_row, kv_head, rows);
    }
  }
  if (split >= s.active) return;

  const auto row_of = [&](const char* cache, int position) {
    return reinterpret_cast<const T*>(cache) + s.slot(position - s.begin) * uint64_t(uint32_t(p.head_dim));
  };
  // K of position base + 8 t + g; dims 32 c + 8 q and the following 7.
  uint4 k_raw[kGroups<kDims>][kPieces];
  const auto load_k = [&](int base, int t) {
    const int position = base + t * 8 + g;
    const T* at = row_of(s.k, position);
#pragma unroll
    for (int c = 0; c < kPieces; ++c) {
      const int dim = c * 32 + q * kElems;
      k_raw[t][c] = position < s.end && dim < p.head_dim ? C::load_streaming_l2(at + dim) : C::zero();
    }
  };
  // V of positions base + 8 t + 2 q and the next; dims 64 b + 8 g and the following 7.
  uint4 v_raw[kBlocks][kGroups<kDims>][2];
  const auto load_v = [&](int base, int b) {
    const int dim = b * 64 + g * kElems;
#pragma unroll
    for (int t = 0; t < kGroups<kDims>; ++t)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int position = base + t * 8 + 2 * q + i;
        v_raw[b][t][i] = position < s.end && dim < p.head_dim
                             ? C::load_streaming_l2(row_of(s.v, position) + dim)
                             : C::zero();
      }
  };
  int base = s.begin + warp * kTile;
  const bool is_old = base + kTile <= s.seq_len - p.query_len;
  if (!is_old) wait_for_previous_kernel();  // it appends the newest positions
#pragma unroll
  for (int t = 0; t < kGroups<kDims>; ++t) load_k(base, t);
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) load_v(base, b);
  if (is_old) wait_for_previous_kernel();

  // Queries in K's order of dims: in registers, or where they would not fit there in shared memory, whose
  // rows are padded so that two rows' 64 bytes, which eight lanes read at once, lie in different banks.
  constexpr int kSharedQueries = kDims > 64 && kHalves == 1 ? kHalfRows : 0;
  __shared__ uint4 shared_queries[kSharedQueries + 1][kDims / kElems + 4];
  uint4 queries[kHalves][kPieces];
  int row_first[kHalves], row_last[kHalves];  // positions rows g and g + 8 see
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    const int row = h * kHalfRows + g;
    const RowPlace place = row_place(p, s, kv_head, row < rows.count(p) ? rows.first + row : 0);
    row_last[h] = row < rows.count(p) ? s.seq_len - p.query_len + place.token : -1;
    row_first[h] = s.first_visible(row_last[h], p.window);
    const T* at = static_cast<const T*>(p.q) + out_offset(p, batch_row, place);  // q lies like the output
#pragma unroll
    for (int c = 0; c < kPieces; ++c) {
      const int dim = c * 32 + q * kElems;
      queries[h][c] = row < rows.count(p) && dim < p.head_dim ? C::load_l2(at + dim) : C::zero();
      if (kSharedQueries > 0 && warp == 0) shared_queries[g][dim / kElems] = queries[h][c];
    }
  }
  if (kSharedQueries > 0) __syncthreads();  // the queries, written by one warp for all

  float max_score[kHalves], sum[kHalves];  // max: of the row; sum: of this lane's positions
  float acc[kBlocks][kElems / 2][kHalves][4] =
      {};  // of dims 64 b + 8 g + 2 w and the next, rows 2 q and the next
#pragma unroll
  for (int h = 0; h < kHalves; ++h) max_score[h] = -INFINITY, sum[h] = 0.f;

#pragma unroll 1
  for (; base < s.end; base += kStep) {
    float scores[kGroups<kDims>][4] = {};  // rows g and g + 8 of positions base + 8 t + 2 q and its neighbor
#pragma unroll
    for (int t = 0; t < kGroups<kDims>; ++t) {
#pragma unroll
      for (int c = 0; c < kPieces; ++c) {
        const uint4 k = k_raw[t][c];
        const uint4 upper = kSharedQueries > 0 ? shared_queries[g][c * 4 + q] : queries[0][c];
        const uint4 lower = kHalves > 1 ? queries[kHalves - 1][c] : C::zero();
        mma<T>(scores[t], upper.x, lower.x, upper.y, lower.y, k.x, k.y);
        mma<T>(scores[t], upper.z, lower.z, upper.w, lower.w, k.z, k.w);
      }
      load_k(base + kStep, t);
    }

    uint32_t weights[kHalves][2] = {};  // the B operand of the second product: the layout scores come in
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      float w[kGroups<kDims>][2];
      float max = max_score[h];
#pragma unroll
      for (int t = 0; t < kGroups<kDims>; ++t)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int position = base + t * 8 + 2 * q + i;
          const bool visible = position < s.end && position <= row_last[h] && position >= row_first[h];
          w[t][i] = visible ? scores[t][2 * h + i] * (p.scale * kLog2e) : -INFINITY;
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
      for (int t = 0; t < kGroups<kDims>; ++t) {
        w[t][0] = exp2_below(w[t][0], max);
        w[t][1] = exp2_below(w[t][1], max);
        sum[h] += w[t][0] + w[t][1];
        weights[h][t] = pack2(w[t][0], w[t][1], T());
      }
    }

#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      uint32_t words[4][4] = {};
#pragma unroll
      for (int t = 0; t < kGroups<kDims>; ++t)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint4 v = v_raw[b][t][i];
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
      load_v(base + kStep, b);
    }
  }

  const Results<kWarps, kDims> results(shared, held);
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    const int row = h * kHalfRows + g;
    sum[h] += __shfl_xor_sync(kAllLanes, sum[h], 1);
    sum[h] += __shfl_xor_sync(kAllLanes, sum[h], 2);
    if (q == 0 && row < rows.count(p)) {
      results.max_sums[warp * results.rows + row] = make_float2(max_score[h], sum[h]);
    }
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int out_row = h * kHalfRows + 2 * q + odd;
      if (out_row >= rows.count(p)) continue;
      float* out = results.outputs + (warp * results.rows + out_row) * kDims + g * kElems;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
#pragma unroll
        for (int w = 0; w < kElems / 2; ++w) {
          *reinterpret_cast<float2*>(out + b * 64 + 2 * w) =
              make_float2(acc[b][w][h][odd], acc[b][w][h][odd + 2]);
        }
    }
  }
  if (one_cluster) return finish_cluster(p, s, results, batch_row, kv_head, rows);
  finish_block(p, s, results, batch_row, kv_head, rows);
}

template <class T, int kDims, int kHalves>
void launch(const DecodeAttentionParams& p, cudaStream_t stream) {
  dim3 grid = split_grid(p, kHalves * kHalfRows, kBlocksPerSm<kDims>);
  const int cluster = cluster_of(grid.x);
  const dim3 block(kWarps * kWarpSize);
  const int rows = std::min(kHalves * kHalfRows, rows_per_kv_head(p));
  const size_t smem_bytes = Results<kWarps, kDims>::bytes(rows, cluster);
  launch_attention(decode_attention_mma_kernel<T, kDims, kHalves>, grid, block, smem_bytes, stream, cluster,
                   p);
}

template <class T>
void launch_typed(const DecodeAttentionParams& p, cudaStream_t stream) {
  const bool few = rows_per_kv_head(p) <= kHalfRows;
  if (p.head_dim <= 64) return few ? launch<T, 64, 1>(p, stream) : launch<T, 64, 2>(p, stream);
  if (p.head_dim <= 128) return few ? launch<T, 128, 1>(p, stream) : launch<T, 128, 2>(p, stream);
  launch<T, 256, 1>(p, stream);  // 16 rows would not fit in registers
}

}  // namespace

void launch_decode_attention_mma(const DecodeAttentionParams& params, cudaStream_t stream) {
  if (params.dtype == DType::kFloat16) return launch_typed<__half>(params, stream);
  launch_typed<__nv_bfloat16>(params, stream);
}

}  // namespace hf_fastpath
