// How the partial results of a tile of rows become its output: those of a block's warps and of its cluster's
// blocks through shared memory, where every block merges rows of its own; those of several clusters through
// the workspace, by a kernel that follows (append_attention_merge.cu): the last block to arrive would have to
// merge alone what the whole device does in a fraction of the time.
#pragma once

#include "append_attention/row_tile.cuh"
#include "common/async.cuh"

namespace hf_fastpath {
namespace append {

// Partial results of a block, in shared memory: kResults of each of kRows rows.
template <int kRows, int kDims, int kResults>
struct Results {
  static constexpr int kStride = kDims + 4;  // rows of a fragment meet in no bank
  static constexpr int kOutputs = kResults * kRows * kStride;
  static constexpr int kBytes = (kOutputs + 2 * kResults * kRows) * int(sizeof(float));
  float* shared;

  __device__ __forceinline__ float* output(int result, int row) const {
    return shared + (result * kRows + row) * kStride;
  }
  __device__ __forceinline__ float2* max_sum(int result, int row) const {
    return reinterpret_cast<float2*>(shared + kOutputs) + result * kRows + row;
  }

  // A warp's sums of its rows `row` (of this lane, and row + 8), as the products' operand C holds them.
  template <class Softmax>
  __device__ __forceinline__ void put(int result, int row, const float (&acc)[kDims / 8][4],
                                      const Softmax& softmax, const ScoreScale& scale) const {
    const int q = threadIdx.x % 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 found = softmax.result(h, scale);
      if (q == 0) *max_sum(result, row + 8 * h) = found;
      float* out = output(result, row + 8 * h) + 2 * q;
#pragma unroll
      for (int n = 0; n < kDims / 8; ++n)
        *reinterpret_cast<float2*>(out + n * 8) = make_float2(acc[n][2 * h], acc[n][2 * h + 1]);
    }
  }
};

// Blocks of a cluster, and this one's number; 1 and 0 without clusters.
struct ClusterPlace {
  int blocks = 1, rank = 0;

  __device__ __forceinline__ ClusterPlace() {
#if HF_FASTPATH_HOPPER
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  }
};

// Loads from the shared memory of a block of the cluster.
__device__ __forceinline__ float4 load_cluster4(const float* shared, int rank) {
#if HF_FASTPATH_HOPPER
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(cluster_address(shared, rank))
               : "memory");
  return x;
#else
  return *reinterpret_cast<const float4*>(shared);
#endif
}
__device__ __forceinline__ float2 load_cluster2(const float2* shared, int rank) {
#if HF_FASTPATH_HOPPER
  float2 x;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
               : "=f"(x.x), "=f"(x.y)
               : "r"(cluster_address(shared, rank))
               : "memory");
  return x;
#else
  return *shared;
#endif
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
    x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, offset));
  return x;
}

// What a row's sums, weighted by 2^(score - max), are multiplied by: 1 / sum, where a sink adds to the sum;
// or 0 for a token that sees nothing. A token whose every score is -inf gets NaN, as in PyTorch.
__device__ __forceinline__ float inverse_sum(const AppendAttentionParams& p, const RowPlace& place, float max,
                                             float sum) {
  if (place.first > place.last) return 0.f;
  float kept = 1.f;
  if (p.sinks) {
    const float sink = load_as_float(p.sinks, place.head, p.dtype) * kLog2e, top = fmaxf(max, sink);
    kept = exp2_below(max, top);
    sum = fmaf(sum, kept, exp2_approx(sink - top));
  }
  return kept / sum;
}

template <class T>
__device__ __forceinline__ void store4(void* out, int64_t at, float4 x, float factor) {
  *reinterpret_cast<uint2*>(static_cast<T*>(out) + at) =
      make_uint2(pack2(x.x * factor, x.y * factor, T()), pack2(x.z * factor, x.w * factor, T()));
}

// The workspace: partial results of every row of every tile, one a cluster.
struct Partials {
  float* outputs;    // [units * rows, groups, head_dim] sums weighted by 2^(score - max)
  float2* max_sums;  // [units * rows, groups]
  int groups;

  __device__ __forceinline__ Partials(const AppendAttentionParams& p, const AppendAttentionPlan& plan)
      : groups(plan.splits / plan.cluster) {
    outputs = static_cast<float*>(p.workspace);
    max_sums = reinterpret_cast<float2*>(outputs + uint64_t(plan.units) * plan.rows * groups * p.head_dim);
  }
};

__device__ __forceinline__ void add_scaled(float4& sum, const float4& x, float factor) {
  sum.x = fmaf(x.x, factor, sum.x), sum.y = fmaf(x.y, factor, sum.y);
  sum.z = fmaf(x.z, factor, sum.z), sum.w = fmaf(x.w, factor, sum.w);
}

// Writes a row of the output, of its maximum, sum and lane by lane its weighted sums.
template <class T, int kQuads>
__device__ __forceinline__ void store_row(const AppendAttentionParams& p, const RowTile& t, int row,
                                          float max, float sum, const float4 (&out)[kQuads]) {
  const RowPlace place = row_place(p, t, row);
  const float inverse = inverse_sum(p, place, max, sum);
  const int64_t at = row_offset(p, t, place);
#pragma unroll
  for (int j = 0; j < kQuads; ++j) {
    const int d = j * 128 + threadIdx.x % kWarpSize * 4;
    if (d < p.head_dim) store4<T>(p.out, at + d, out[j], inverse);
  }
}

// Merges `count` partial results of each of the rows from `begin` to `end`, of which the warps take one after
// the other; a warp has kAtOnce of them at once, kBatch results of each on their way: what takes long is how
// far they are. `source` gives results, `store` takes a row's maximum, sum and, lane by lane, weighted sums.
template <int kDims, int kWarps, int kAtOnce, int kBatch, class Source, class Store>
__device__ __forceinline__ void merge_rows(int begin, int end, int count, int head_dim, const Source& source,
                                           const Store& store) {
  constexpr int kQuads = (kDims + 127) / 128;  // fours of dims a lane has
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
#pragma unroll 1
  for (int first_row = begin + warp; first_row < end; first_row += kWarps * kAtOnce) {
    float4 out[kAtOnce][kQuads] = {}, ahead[kAtOnce][kBatch][kQuads];
    float max[kAtOnce], sum[kAtOnce], factor[kAtOnce];
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) max[r] = -INFINITY, sum[r] = 0.f;
    const auto load = [&](int from) {
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) {
        const int row = first_row + r * kWarps;
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
#pragma unroll
          for (int j = 0; j < kQuads; ++j) {
            const int d = j * 128 + lane * 4;
            ahead[r][i][j] = row < end && from + i < count && d < head_dim ? source.output(row, from + i, d)
                                                                           : make_float4(0.f, 0.f, 0.f, 0.f);
          }
      }
    };
#pragma unroll 1
    for (int chunk = 0; chunk < count; chunk += kWarpSize) {
      float2 mine[kAtOnce];  // of result chunk + lane
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) {
        const int row = first_row + r * kWarps;
        mine[r] = row < end && chunk + lane < count ? source.max_sum(row, chunk + lane)
                                                    : make_float2(-INFINITY, 0.f);
      }
      load(chunk);
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) {
        const float top = fmaxf(max[r], warp_max(mine[r].x)), shrink = exp2_below(max[r], top);
        factor[r] = exp2_below(mine[r].x, top);
        sum[r] = fmaf(sum[r], shrink, warp_sum(mine[r].y * factor[r]));
        max[r] = top;
#pragma unroll
        for (int j = 0; j < kQuads; ++j) {
          const float4 before = out[r][j];
          out[r][j] = make_float4(0.f, 0.f, 0.f, 0.f);
          add_scaled(out[r][j], before, shrink);
        }
      }
#pragma unroll 1
      for (int from = chunk; from < min(chunk + kWarpSize, count); from += kBatch) {
        if (from > chunk) load(from);
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r)
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            const float factor_i = __shfl_sync(kAllLanes, factor[r], from - chunk + i);
#pragma unroll
            for (int j = 0; j < kQuads; ++j) add_scaled(out[r][j], ahead[r][i][j], factor_i);
          }
      }
    }
#pragma unroll
    for (int r = 0; r < kAtOnce; ++r) {
      const int row = first_row + r * kWarps;
      if (row < end) store(row, max[r], sum[r], out[r]);
    }
  }
}

// Takes as many rows at once as there are for a warp, and fewer results of each.
template <int kDims, int kWarps, class Source, class Store>
__device__ __forceinline__ void merge_all(int begin, int end, int count, int head_dim, const Source& source,
                                          const Store& store) {
  if constexpr (kWarps < 8) {  // blocks that share an SM with others, and its registers
    merge_rows<kDims, kWarps, 1, (kDims > 128 ? 4 : 8)>(begin, end, count, head_dim, source, store);
  } else {
    constexpr int kRoom = kDims > 128 ? 8 : 16;  // of fours in registers
    if (end - begin <= kWarps || count > 8) {
      merge_rows<kDims, kWarps, 1, kRoom>(begin, end, count, head_dim, source, store);
    } else {
      merge_rows<kDims, kWarps, 4, kRoom / 4>(begin, end, count, head_dim, source, store);
    }
  }
}

// Results of the blocks of a cluster.
template <class BlockResults, int kResults>
struct ClusterSource {
  const BlockResults& results;

  __device__ __forceinline__ float2 max_sum(int row, int i) const {
    return load_cluster2(results.max_sum(i % kResults, row), i / kResults);
  }
  __device__ __forceinline__ float4 output(int row, int i, int d) const {
    return load_cluster4(results.output(i % kResults, row) + d, i / kResults);
  }
};

// Called by the first kThreads threads of every block whose cluster has work, its results written, or none if
// it has no work; barrier `id` is theirs.
template <class T, int kRows, int kDims, int kResults, int kThreads>
__device__ __forceinline__ void finish(const AppendAttentionParams& p, const AppendAttentionPlan& plan,
                                       const RowTile& t, const Results<kRows, kDims, kResults>& results,
                                       int id) {
  using BlockResults = Results<kRows, kDims, kResults>;
  constexpr int kWarps = kThreads / kWarpSize, kQuads = (kDims + 127) / 128;
  const ClusterPlace place;
  const int first_split = t.split - place.rank;
  const int present = min(t.active - first_split, place.blocks);  // blocks of the cluster that have work
  const int each = (t.rows + place.blocks - 1) / place.blocks, begin = place.rank * each,
            end = min(begin + each, t.rows);
  const bool is_whole = plan.splits == plan.cluster;
  const auto store = [&](int row, float max, float sum, const float4(&out)[kQuads]) {
    if (is_whole) return store_row<T>(p, t, row, max, sum, out);
    const Partials partials(p, plan);
    const uint64_t at = (uint64_t(t.unit) * kRows + row) * partials.groups + first_split / place.blocks;
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
      const int d = j * 128 + lane * 4;
      if (d < p.head_dim) *reinterpret_cast<float4*>(partials.outputs + at * p.head_dim + d) = out[j];
    }
    if (lane == 0) partials.max_sums[at] = make_float2(max, sum);
  };

  sync_some(id, kThreads);  // every warp's results
  if (place.blocks > 1) arrive_cluster(), wait_cluster();
  const ClusterSource<BlockResults, kResults> source{results};
  merge_all<kDims, kWarps>(begin, end, present * kResults, p.head_dim, source, store);
  if (place.blocks > 1) arrive_cluster(), wait_cluster();  // nobody reads this block's shared memory any more
}

}  // namespace append
}  // namespace hf_fastpath
