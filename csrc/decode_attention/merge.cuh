// How partial results of a KV head, of a block's warps and of the blocks it is split over, become one.
#pragma once

#include <type_traits>

#include "common/async.cuh"
#include "common/numeric.cuh"
#include "common/softmax.cuh"
#include "common/warp.cuh"
#include "decode_attention/split.cuh"

namespace hf_fastpath {

// The workspace as the kernel sees it. A "row" here is one query of one head; rows of a KV head are
// neighbors.
struct Partials {
  float* outputs;      // [rows, kMaxSplits, head_dim] sums weighted by 2^(score - max)
  float2* max_sums;    // [rows, kMaxSplits] max and sum of the weights
  unsigned* counters;  // from the end backwards, one for every block of rows of a KV head

  __device__ __forceinline__ explicit Partials(const DecodeAttentionParams& p) {
    const uint32_t splits = p.batch * p.query_len * p.num_heads * kMaxSplits;  // of all rows
    outputs = static_cast<float*>(p.workspace);
    max_sums = reinterpret_cast<float2*>(outputs + uint64_t(splits) * uint32_t(p.head_dim));
    counters = reinterpret_cast<unsigned*>(static_cast<char*>(p.workspace) + p.workspace_bytes);
  }
};

// Index in the workspace of a block's first row.
__device__ __forceinline__ int first_row_of(const DecodeAttentionParams& p, int batch_row, int kv_head,
                                            Rows rows) {
  return (batch_row * p.num_kv_heads + kv_head) * rows_per_kv_head(p) + rows.first;
}

// Type of q and the output: Q, or that of the parameters where Q is void.
template <class Q>
__device__ __forceinline__ DType query_dtype(const DecodeAttentionParams& p) {
  if constexpr (std::is_void_v<Q>) return p.dtype;
  return std::is_same_v<Q, float>    ? DType::kFloat32
         : std::is_same_v<Q, __half> ? DType::kFloat16
                                     : DType::kBFloat16;
}

// What a row's sums, weighted by 2^(score - max), and its attention over other keys are multiplied by.
struct Shares {
  float own, other;
};

// The shares of a row: 1 / sum, where a sink and other keys add to the sum; or 0 for a token that sees
// nothing. A token whose every score is -inf gets NaN, as in PyTorch. Writes the row's lse if `writes`.
template <class Q, bool kJoins>
__device__ __forceinline__ Shares find_shares(const DecodeAttentionParams& p, int batch_row,
                                              const RowPlace& place, float max, float sum, bool writes) {
  float own = 1.f, other = 0.f;
  if (!place.sees_any) own = sum = 0.f, max = -INFINITY;
  if (p.sinks && place.sees_any) {
    const float sink = load_as_float(p.sinks, place.head, query_dtype<Q>(p)) * kLog2e, top = fmaxf(max, sink);
    own = exp2_below(max, top);
    sum = fmaf(sum, own, exp2_approx(sink - top));
    max = top;
  }
  if (kJoins && p.other) {
    const float lse = __ldcg(p.other_lse + output_row(p, batch_row, place)) * kLog2e, top = fmaxf(max, lse);
    const float kept = exp2_below(max, top);
    other = exp2_below(lse, top);
    sum = fmaf(sum, kept, other);
    own *= kept, max = top;
  }
  if (kJoins && p.lse && writes) p.lse[output_row(p, batch_row, place)] = (max + log2f(sum)) * (1.f / kLog2e);
  if (!place.sees_any && sum == 0.f) return {0.f, 0.f};
  return {own / sum, kJoins && p.other ? other / sum : 0.f};
}

// Adds a share of four neighbors of the attention over other keys.
template <class Q>
__device__ __forceinline__ void add_other(const DecodeAttentionParams& p, int64_t at, float share,
                                          float4& x) {
  float other[4];
  load_as_floats(p.other, at, query_dtype<Q>(p), other);
  x.x = fmaf(other[0], share, x.x), x.y = fmaf(other[1], share, x.y);
  x.z = fmaf(other[2], share, x.z), x.w = fmaf(other[3], share, x.w);
}

// Stores four neighbors of the output.
template <class Q>
__device__ __forceinline__ void store_out(const DecodeAttentionParams& p, int64_t at, float4 x) {
  const DType dtype = query_dtype<Q>(p);
  if (dtype == DType::kFloat32) {
    *reinterpret_cast<float4*>(static_cast<float*>(p.out) + at) = x;
    return;
  }
  const bool half = dtype == DType::kFloat16;
  const uint2 halves = half ? make_uint2(pack2(x.x, x.y, __half()), pack2(x.z, x.w, __half()))
                            : make_uint2(pack2(x.x, x.y, __nv_bfloat16()), pack2(x.z, x.w, __nv_bfloat16()));
  *reinterpret_cast<uint2*>(static_cast<char*>(p.out) + at * 2) = halves;
}

// Says in every thread of the block whether it is the last of `active` blocks to arrive; their partial
// results are then visible to it. The counter wraps to zero by itself.
__device__ __forceinline__ bool arrive_last(unsigned* counter, int active) {
  __shared__ bool last;
  __threadfence();  // this thread's partial results, before the block's arrival
  __syncthreads();  // all threads' partial results
  if (threadIdx.x == 0) last = atomicInc(counter, active - 1) == unsigned(active - 1);
  __syncthreads();            // `last`
  if (last) __threadfence();  // the other blocks' results, after their arrival
  return last;
}

// Writes what the first `count` partial results of each of `rows` are multiplied by: kMaxSplits values a row,
// zeros from `count` on; behind them a value a row for the attention over other keys. `base`: the first row's
// index in the workspace.
template <class Q, int kThreads, bool kJoins>
__device__ __forceinline__ void find_factors(const DecodeAttentionParams& p, const Split& s,
                                             const Partials& partials, int base, int count, int batch_row,
                                             int kv_head, Rows rows, float* factors) {
  constexpr int kPerLane = kMaxSplits / kWarpSize;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
#pragma unroll 1
  for (int r = warp; r < rows.count(p); r += kThreads / kWarpSize) {
    float2 max_sum[kPerLane];
    float max = -INFINITY, sum = 0.f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int split = lane + i * kWarpSize;
      max_sum[i] = split < count ? __ldcg(partials.max_sums + (base + r) * kMaxSplits + split)
                                 : make_float2(-INFINITY, 0.f);
      max = fmaxf(max, max_sum[i].x);
    }
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
      max = fmaxf(max, __shfl_xor_sync(kAllLanes, max, offset));
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) sum += max_sum[i].y * exp2_below(max_sum[i].x, max);
    const RowPlace place = row_place(p, s, kv_head, rows.first + r);
    const Shares shares = find_shares<Q, kJoins>(p, batch_row, place, max, warp_sum(sum), lane == 0);
    if (kJoins && p.other && lane == 0) factors[rows.count(p) * kMaxSplits + r] = shares.other;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      factors[r * kMaxSplits + lane + i * kWarpSize] = exp2_below(max_sum[i].x, max) * shares.own;
  }
}

// Merges the first `count` partial results of `rows` of a KV head and writes the outputs. `factors`: shared
// memory for kMaxSplits + 1 values a row.
template <class Q, int kThreads, int kDims, bool kJoins>
__device__ __forceinline__ void merge_splits(const DecodeAttentionParams& p, const Split& s,
                                             const Partials& partials, int count, int batch_row, int kv_head,
                                             Rows rows, float* factors) {
  constexpr int kQuads = kDims / 4, kAhead = 16;
  static_assert(kMaxSplits % kAhead == 0, "factors are read kAhead at a time");
  const int base = first_row_of(p, batch_row, kv_head, rows), quads = rows.count(p) * kQuads;
  // Every thread takes each of its fours of outputs through the splits, kAhead at a time: one loop over both,
  // so that the many instructions of a step exist once.
  int quad = threadIdx.x, first = 0;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
  do {
    const int r = unsigned(quad) / kQuads, d = unsigned(quad) % kQuads * 4;
    const bool is_output = quad < quads && d < p.head_dim;
    const int left = is_output ? count - first : 0;
    const float* from =
        partials.outputs + d + uint64_t(uint32_t((base + r) * kMaxSplits + first)) * uint32_t(p.head_dim);
    float4 ahead[kAhead];  // in flight: each goes to L2
#pragma unroll
    for (int i = 0; i < kAhead; ++i, from += p.head_dim)
      ahead[i] = i < left ? __ldcg(reinterpret_cast<const float4*>(from)) : make_float4(0.f, 0.f, 0.f, 0.f);
    if (quad == int(threadIdx.x) && first == 0) {  // after the first loads, which take as long to come
      find_factors<Q, kThreads, kJoins>(p, s, partials, base, count, batch_row, kv_head, rows, factors);
      __syncthreads();  // factors
    }
    if (is_output) {
#pragma unroll
      for (int i = 0; i < kAhead; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(factors + r * kMaxSplits + first + i);
        const float f[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float4 x = ahead[i + j];
          sum.x = fmaf(x.x, f[j], sum.x), sum.y = fmaf(x.y, f[j], sum.y);
          sum.z = fmaf(x.z, f[j], sum.z), sum.w = fmaf(x.w, f[j], sum.w);
        }
      }
    }
    first += kAhead;
    if (first < count) continue;
    if (is_output) {
      const int64_t at = out_offset(p, batch_row, row_place(p, s, kv_head, rows.first + r)) + d;
      if (kJoins && p.other) add_other<Q>(p, at, factors[rows.count(p) * kMaxSplits + r], sum);
      store_out<Q>(p, at, sum);
    }
    sum = make_float4(0.f, 0.f, 0.f, 0.f);
    quad += kThreads, first = 0;
  } while (quad < quads);
}

// What the warps of a block hand each other: in dynamic shared memory, `stride` bytes apart.
template <int kWarps, int kDims>
struct WarpResults {
  char* shared;
  int stride;

  static constexpr int kMaxRows = 16;
  static __host__ __device__ constexpr int bytes(int rows) {
    return kMaxRows * sizeof(float2) + rows * kDims * sizeof(float);
  }

  // [rows] maximum of the scores, sum of 2^(score - max)
  __device__ __forceinline__ float2* max_sums(int warp) const {
    return reinterpret_cast<float2*>(shared + warp * stride);
  }
  // [rows, kDims] V weighted by 2^(score - max)
  __device__ __forceinline__ float* outputs(int warp) const {
    return reinterpret_cast<float*>(max_sums(warp) + kMaxRows);
  }

  // Merges the warps' results for elements d to d + 3 of row r.
  __device__ __forceinline__ float4 merge(int r, int d, float2& max_sum) const {
    float2 of_warp[kWarps];
    float max = -INFINITY, total = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) of_warp[w] = max_sums(w)[r], max = fmaxf(max, of_warp[w].x);
    float4 out = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float shrink = exp2_below(of_warp[w].x, max);
      const float4 x = *reinterpret_cast<const float4*>(outputs(w) + r * kDims + d);
      total += of_warp[w].y * shrink;
      out.x = fmaf(x.x, shrink, out.x), out.y = fmaf(x.y, shrink, out.y);
      out.z = fmaf(x.z, shrink, out.z), out.w = fmaf(x.w, shrink, out.w);
    }
    max_sum = make_float2(max, total);
    return out;
  }

  // Shared memory for merge_splits, once these results have been read.
  __device__ __forceinline__ float* factors() const {
    static_assert(kWarps * kDims >= kMaxSplits + 1, "no room for the factors");
    return reinterpret_cast<float*>(shared);
  }
};

// Merges the warps' results, and as the last block of the KV head the blocks'. Every thread calls it once its
// part of `results` is written. kJoins: there may be attention over other keys, or its sums are asked for.
template <class Q, bool kJoins, int kWarps, int kDims>
__device__ __forceinline__ void finish_block(const DecodeAttentionParams& p, const Split& s,
                                             const WarpResults<kWarps, kDims>& results, int batch_row,
                                             int kv_head, Rows rows) {
  constexpr int kThreads = kWarps * kWarpSize;
  __syncthreads();  // every warp's result
  trace(TracePoint::kMerged);
  const Partials partials(p);
  const int base = first_row_of(p, batch_row, kv_head, rows);
  constexpr int kQuads = kDims / 4;
  for (int i = threadIdx.x; i < rows.count(p) * kQuads; i += kThreads) {
    const int r = unsigned(i) / kQuads, d = unsigned(i) % kQuads * 4;
    if (d >= p.head_dim) continue;
    float2 max_sum;
    float4 out = results.merge(r, d, max_sum);
    if (s.active == 1) {
      const RowPlace place = row_place(p, s, kv_head, rows.first + r);
      const int64_t at = out_offset(p, batch_row, place) + d;
      const Shares shares = find_shares<Q, kJoins>(p, batch_row, place, max_sum.x, max_sum.y, d == 0);
      out.x *= shares.own, out.y *= shares.own, out.z *= shares.own, out.w *= shares.own;
      if (kJoins && p.other) add_other<Q>(p, at, shares.other, out);
      store_out<Q>(p, at, out);
    } else {
      const uint32_t at = (base + r) * kMaxSplits + blockIdx.x;
      *reinterpret_cast<float4*>(partials.outputs + uint64_t(at) * uint32_t(p.head_dim) + d) = out;
      if (d == 0) partials.max_sums[at] = max_sum;
    }
  }
  if (s.active == 1) return;
  const int counter = batch_row * gridDim.y + blockIdx.y;
  if (!arrive_last(partials.counters - 1 - counter, s.active)) return;
  merge_splits<Q, kThreads, kDims, kJoins>(p, s, partials, s.active, batch_row, kv_head, rows,
                                           results.factors());
}

}  // namespace hf_fastpath
