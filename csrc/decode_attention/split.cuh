// How a KV head's visible positions are split over blocks, and how the blocks' partial results become one.
// The grid depends on shapes alone; how many of its blocks have work is computed on the device from the
// lengths there.
#pragma once

#include <type_traits>

#include "common/async.cuh"
#include "common/cuda_check.cuh"
#include "common/numeric.cuh"
#include "common/softmax.cuh"
#include "common/warp.cuh"
#include "decode_attention/decode_attention.h"

namespace hf_fastpath {

constexpr int kMinChunk = 64;       // positions of a split: fewer cost more in merging than they save
constexpr int kChunkMultiple = 16;  // chunks end on whole warp steps

constexpr int kSharedBytesEverywhere = 99 * 1024;  // that a block may have, from sm_80 on

// Positions one block handles, of one row of the batch and one KV head.
struct Split {
  int seq_len, start;             // of the row; start: first position padding leaves visible
  int begin, end;                 // positions of this block
  int active;                     // splits that have work, at least 1
  uint32_t capacity, first_slot;  // slots of a cache row; slot of `begin`
  const char* k;                  // this row's and head's cache; in pages, this head's of page 0
  const char* v;

  // First position that the token at `position` sees.
  __device__ __forceinline__ int first_visible(int position, int window) const {
    return window > 0 ? max(start, position - window + 1) : start;
  }
};

// A split and where its positions lie.
template <bool kPaged>
struct PlacedSplit : Split {
  static constexpr bool kIsPaged = false;

  // Rows of `k` and `v`, counted from there: position begin + i, i < capacity, lies in this one,
  __device__ __forceinline__ uint32_t slot(int i) const {
    const uint32_t slot = first_slot + i;
    return slot < capacity ? slot : slot - capacity;
  }
  // and so many from it on lie one after the other.
  __device__ __forceinline__ int adjacent(uint32_t slot) const { return capacity - slot; }
};

template <>
struct PlacedSplit<true> : Split {
  static constexpr bool kIsPaged = true;
  const int32_t* pages;  // of this row of the batch: page of each block of slots
  int page_shift;        // log2 of a block's slots
  uint32_t page_stride;  // rows from a page to the next

  __device__ __forceinline__ uint32_t slot(int i) const {
    uint32_t slot = first_slot + i;
    if (slot >= capacity) slot -= capacity;
    return uint32_t(__ldg(pages + (slot >> page_shift))) * page_stride + (slot & ((1u << page_shift) - 1));
  }
  __device__ __forceinline__ int adjacent(uint32_t slot) const {
    const uint32_t size = 1u << page_shift;
    return size - (slot & (size - 1));
  }
};

// `alone`: positions that one block takes without a split. Chunks are multiples of kMultiple.
template <bool kPaged, int kMultiple = kChunkMultiple>
__device__ __forceinline__ PlacedSplit<kPaged> find_split(const DecodeAttentionParams& p, int row,
                                                          int kv_head, int split, unsigned splits,
                                                          unsigned alone, int kv_elem_bytes) {
  PlacedSplit<kPaged> s;
  s.seq_len = __ldg(p.seq_lens + row);
  s.start = p.starts ? max(__ldg(p.starts + row), 0) : 0;
  const char* k = static_cast<const char*>(p.k_cache);
  const char* v = static_cast<const char*>(p.v_cache);
  int64_t capacity = p.capacity;
  if (p.kv_table) {
    const int64_t columns = kPaged               ? kPagedTableColumns
                            : kv_elem_bytes == 1 ? kQuantizedTableColumns
                                                 : kTableColumns;
    const int64_t* entry = p.kv_table + columns * p.layer;
    k = reinterpret_cast<const char*>(__ldg(reinterpret_cast<const long long*>(entry)));
    v = reinterpret_cast<const char*>(__ldg(reinterpret_cast<const long long*>(entry) + 1));
    capacity = __ldg(reinterpret_cast<const long long*>(entry) + 2);
    if constexpr (kPaged) {
      s.pages = reinterpret_cast<const int32_t*>(__ldg(reinterpret_cast<const long long*>(entry) + 3));
    }
  }
  s.capacity = static_cast<uint32_t>(capacity);
  uint32_t first_head = row * p.num_kv_heads + kv_head, head_rows = s.capacity;
  if constexpr (kPaged) {
    if (!p.kv_table) s.pages = p.pages.table;
    s.pages += row * (s.capacity >> p.pages.shift);
    s.page_shift = p.pages.shift;
    first_head = kv_head, head_rows = 1u << p.pages.shift;
    s.page_stride = head_rows * p.num_kv_heads;
  }
  const uint64_t head_offset = uint64_t(first_head) * head_rows * uint32_t(p.head_dim * kv_elem_bytes);
  s.k = k + head_offset;
  s.v = v + head_offset;
  // What the first token sees bounds what any sees; a ring holds no more than its capacity.
  const int first =
      max(max(s.first_visible(s.seq_len - p.query_len, p.window), 0), s.seq_len - int(s.capacity));
  const unsigned length = max(s.seq_len - first, 0);  // unsigned numbers take fewer instructions to divide
  unsigned chunk = max((length + splits - 1) / splits, unsigned(length <= alone ? alone : kMinChunk));
  chunk = (chunk + kMultiple - 1) / kMultiple * kMultiple;
  s.active = max(int((length + chunk - 1) / chunk), 1);
  s.begin = first + split * chunk;
  s.end = min(s.begin + chunk, s.seq_len);
  s.first_slot = static_cast<uint32_t>(max(s.begin, 0)) % s.capacity;
  return s;
}

// Scales of a quantized cache's positions, of one row and KV head, by slot.
struct Scales {
  const uint16_t *k, *v;
};

__device__ __forceinline__ Scales find_scales(const DecodeAttentionParams& p, const Split& s, int row,
                                              int kv_head) {
  const uint16_t *k = p.k_scales, *v = p.v_scales;
  if (p.kv_table) {
    const auto* entry = reinterpret_cast<const long long*>(p.kv_table + kQuantizedTableColumns * p.layer);
    k = reinterpret_cast<const uint16_t*>(__ldg(entry + 3));
    v = reinterpret_cast<const uint16_t*>(__ldg(entry + 4));
  }
  const uint64_t offset = uint64_t(uint32_t(row * p.num_kv_heads + kv_head)) * s.capacity;
  return {k + offset, v + offset};
}

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

// number / divisor, where `inverse` is inverse_of(divisor).
__device__ __forceinline__ int divide(int number, uint32_t inverse) {
  return static_cast<int>(uint64_t(uint32_t(number)) * inverse >> 31);
}

// Queries that share a KV head's cache.
__host__ __device__ inline int rows_per_kv_head(const DecodeAttentionParams& p) {
  return p.group * p.query_len;
}

// A block's rows: queries of one KV head.
struct Rows {
  int first, most;

  __device__ __forceinline__ int count(const DecodeAttentionParams& p) const {
    return min(most, rows_per_kv_head(p) - first);
  }
};

// Index in the workspace of a block's first row.
__device__ __forceinline__ int first_row_of(const DecodeAttentionParams& p, int batch_row, int kv_head,
                                            Rows rows) {
  return (batch_row * p.num_kv_heads + kv_head) * rows_per_kv_head(p) + rows.first;
}

// A row's place: which query of which head, and what it sees.
struct RowPlace {
  int token, head;  // query of query_len; query head
  bool sees_any;    // some position is visible to it
};

__device__ __forceinline__ RowPlace row_place(const DecodeAttentionParams& p, const Split& s, int kv_head,
                                              int row) {
  RowPlace place;
  place.token = divide(row, p.group_inverse);
  place.head = kv_head * p.group + row - place.token * p.group;
  const int position = s.seq_len - p.query_len + place.token;
  place.sees_any = position >= max(s.first_visible(position, p.window), 0);
  return place;
}

__device__ __forceinline__ int64_t out_offset(const DecodeAttentionParams& p, int batch_row,
                                              const RowPlace& place) {
  const int row = (batch_row * p.query_len + place.token) * p.num_heads + place.head;
  return uint64_t(uint32_t(row)) * uint32_t(p.head_dim);
}

// Type of q and the output: Q, or that of the parameters where Q is void.
template <class Q>
__device__ __forceinline__ DType query_dtype(const DecodeAttentionParams& p) {
  if constexpr (std::is_void_v<Q>) return p.dtype;
  return std::is_same_v<Q, float>    ? DType::kFloat32
         : std::is_same_v<Q, __half> ? DType::kFloat16
                                     : DType::kBFloat16;
}

// What a row's sums, weighted by 2^(score - max), are multiplied by: 1 / sum, where a sink adds to the sum;
// or 0 for a token that sees nothing. A token whose every score is -inf gets NaN, as in PyTorch.
template <class Q>
__device__ __forceinline__ float inverse_sum(const DecodeAttentionParams& p, const RowPlace& place, float max,
                                             float sum) {
  if (!place.sees_any) return 0.f;
  float kept = 1.f;
  if (p.sinks) {
    const float sink = load_as_float(p.sinks, place.head, query_dtype<Q>(p)) * kLog2e, top = fmaxf(max, sink);
    kept = exp2_below(max, top);
    sum = fmaf(sum, kept, exp2_approx(sink - top));
  }
  return kept / sum;
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
  const uint2 packed = half ? make_uint2(pack2(x.x, x.y, __half()), pack2(x.z, x.w, __half()))
                            : make_uint2(pack2(x.x, x.y, __nv_bfloat16()), pack2(x.z, x.w, __nv_bfloat16()));
  *reinterpret_cast<uint2*>(static_cast<char*>(p.out) + at * 2) = packed;
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
// zeros from `count` on. `base`: the first row's index in the workspace.
template <class Q, int kThreads>
__device__ __forceinline__ void find_factors(const DecodeAttentionParams& p, const Split& s,
                                             const Partials& partials, int base, int count, int kv_head,
                                             Rows rows, float* factors) {
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
    const float inverse = inverse_sum<Q>(p, row_place(p, s, kv_head, rows.first + r), max, warp_sum(sum));
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      factors[r * kMaxSplits + lane + i * kWarpSize] = exp2_below(max_sum[i].x, max) * inverse;
  }
}

// Merges the first `count` partial results of `rows` of a KV head and writes the outputs. `factors`: shared
// memory for kMaxSplits values a row.
template <class Q, int kThreads, int kDims>
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
      find_factors<Q, kThreads>(p, s, partials, base, count, kv_head, rows, factors);
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
    if (is_output)
      store_out<Q>(p, out_offset(p, batch_row, row_place(p, s, kv_head, rows.first + r)) + d, sum);
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
    static_assert(kWarps * kDims >= kMaxSplits, "no room for the factors");
    return reinterpret_cast<float*>(shared);
  }
};

// Merges the warps' results, and as the last block of the KV head the blocks'. Every thread calls it once its
// part of `results` is written.
template <class Q, int kWarps, int kDims>
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
      const float inverse = inverse_sum<Q>(p, place, max_sum.x, max_sum.y);
      out.x *= inverse, out.y *= inverse, out.z *= inverse, out.w *= inverse;
      store_out<Q>(p, out_offset(p, batch_row, place) + d, out);
    } else {
      const uint32_t at = (base + r) * kMaxSplits + blockIdx.x;
      *reinterpret_cast<float4*>(partials.outputs + uint64_t(at) * uint32_t(p.head_dim) + d) = out;
      if (d == 0) partials.max_sums[at] = max_sum;
    }
  }
  if (s.active == 1) return;
  const int counter = batch_row * gridDim.y + blockIdx.y;
  if (!arrive_last(partials.counters - 1 - counter, s.active)) return;
  merge_splits<Q, kThreads, kDims>(p, s, partials, s.active, batch_row, kv_head, rows, results.factors());
}

// Splits to launch for `units` independent pieces of work when `slots` blocks run at once and a piece can be
// cut into at most `most`: the smallest number whose waves are within 5 % of the best.
inline int choose_splits(int64_t units, int64_t slots, int64_t most) {
  const auto time = [&](int64_t splits) {
    return static_cast<double>((units * splits + slots - 1) / slots) / static_cast<double>(splits);
  };
  most = most < 1 ? 1 : most > kMaxSplits ? kMaxSplits : most;
  double best = time(1);
  for (int64_t splits = 2; splits <= most; ++splits) best = time(splits) < best ? time(splits) : best;
  int64_t splits = 1;
  while (splits < most && time(splits) > 1.05 * best) ++splits;
  return static_cast<int>(splits);
}

// The most pieces a cache of this size can be cut into; with a table its size is not known here.
inline int64_t most_splits(const DecodeAttentionParams& p) {
  int64_t longest = p.kv_table ? int64_t(kMaxSplits) * kMinChunk : p.capacity;
  if (p.window > 0 && p.window + p.query_len - 1 < longest) longest = p.window + p.query_len - 1;
  return (longest + kMinChunk - 1) / kMinChunk;
}

// Grid (splits, KV heads * blocks of rows, batch rows) when an SM runs `blocks_per_sm` blocks of kRows rows
// at once.
inline dim3 split_grid(const DecodeAttentionParams& p, int rows_per_block, int blocks_per_sm) {
  const int row_blocks = (rows_per_kv_head(p) + rows_per_block - 1) / rows_per_block;
  const int64_t units = int64_t(p.batch) * p.num_kv_heads * row_blocks;
  const int64_t slots = int64_t(multiprocessor_count()) * blocks_per_sm;
  return dim3(choose_splits(units, slots, most_splits(p)), p.num_kv_heads * row_blocks, p.batch);
}

inline void launch_attention(void (*kernel)(DecodeAttentionParams), dim3 grid, dim3 block, size_t smem_bytes,
                             cudaStream_t stream, const DecodeAttentionParams& p) {
  HF_FASTPATH_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                              static_cast<int>(smem_bytes)));
  HF_FASTPATH_CUDA_CHECK(launch_overlapping(kernel, grid, block, smem_bytes, stream, p.overlap, p));
}

}  // namespace hf_fastpath
