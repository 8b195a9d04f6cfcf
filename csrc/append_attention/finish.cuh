// How the partial results of a tile of rows become its output: those of a block's warps and of its cluster's
// blocks through shared memory, those of several clusters through the workspace, where the last to arrive
// merges them. In a cluster, and among clusters, every block merges rows of its own.
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

// From the shared memory of a block of the cluster.
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

// What a row's sums, weighted by 2^(score - max), are multiplied by: 1 / sum, where a sink adds to the sum; or
// 0 for a token that sees nothing. A token whose every score is -inf gets NaN, as in PyTorch.
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

// The workspace: `groups` partial results, one a cluster, of every row of every tile.
struct Partials {
  float* outputs;      // [units * rows, groups, head_dim] sums weighted by 2^(score - max)
  float2* max_sums;    // [units * rows, groups]
  unsigned* counters;  // from the end backwards: of every unit, one a block of a cluster

  __device__ __forceinline__ Partials(const AppendAttentionParams& p, int units, int rows, int groups) {
    outputs = static_cast<float*>(p.workspace);
    max_sums = reinterpret_cast<float2*>(outputs + uint64_t(units) * rows * groups * p.head_dim);
    counters = reinterpret_cast<unsigned*>(static_cast<char*>(p.workspace) + p.workspace_bytes);
  }
};

__device__ __forceinline__ void add_scaled(float4& sum, const float4& x, float factor) {
  sum.x = fmaf(x.x, factor, sum.x), sum.y = fmaf(x.y, factor, sum.y);
  sum.z = fmaf(x.z, factor, sum.z), sum.w = fmaf(x.w, factor, sum.w);
}

// sync_some that says whether `x` is true in any of the threads.
__device__ __forceinline__ bool any_of_some(int id, int threads, bool x) {
  uint32_t any;
  asm volatile(
      "{\n"
      ".reg .pred p, q;\n"
      "setp.ne.u32 p, %1, 0;\n"
      "bar.red.or.pred q, %2, %3, p;\n"
      "selp.u32 %0, 1, 0, q;\n"
      "}\n"
      : "=r"(any)
      : "r"(uint32_t(x)), "r"(id), "r"(threads)
      : "memory");
  return any;
}

// Called by the first kThreads threads of every block that has found its tile, its results written, or none if
// it has no work; barrier `id` is theirs.
template <class T, int kRows, int kDims, int kResults, int kThreads>
__device__ __forceinline__ void finish(const AppendAttentionParams& p, const RowTile& t,
                                       const Results<kRows, kDims, kResults>& results, int id) {
  constexpr int kWarps = kThreads / kWarpSize, kQuads = (kDims + 127) / 128;  // fours of dims a lane has
  const ClusterPlace place;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int first_split = t.split - place.rank;
  const int present = min(t.active - first_split, place.blocks);  // blocks of the cluster that have work
  const int groups = (t.active + place.blocks - 1) / place.blocks, group = first_split / place.blocks;
  const int most_groups = gridDim.x / place.blocks;
  const int each = (t.rows + place.blocks - 1) / place.blocks, begin = place.rank * each,
            end = min(begin + each, t.rows);
  const Partials partials(p, gridDim.y * gridDim.z, kRows, most_groups);

  sync_some(id, kThreads);  // every warp's results
  if (place.blocks > 1) arrive_cluster(), wait_cluster();
  for (int row = begin + warp; row < end; row += kWarps) {
    float2 mine = make_float2(-INFINITY, 0.f);  // of result `lane`
    if (lane < present * kResults) mine = load_cluster2(results.max_sum(lane % kResults, row), lane / kResults);
    const float max = warp_max(mine.x), factor = exp2_below(mine.x, max), sum = warp_sum(mine.y * factor);
    float4 out[kQuads];
#pragma unroll
    for (int j = 0; j < kQuads; ++j) out[j] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
    for (int i = 0; i < present * kResults; ++i) {
      const float factor_i = __shfl_sync(kAllLanes, factor, i);
#pragma unroll
      for (int j = 0; j < kQuads; ++j) {
        const int d = j * 128 + lane * 4;
        if (d < kDims)
          add_scaled(out[j], load_cluster4(results.output(i % kResults, row) + d, i / kResults), factor_i);
      }
    }
    const RowPlace at = row_place(p, t, row);
    const float inverse = inverse_sum(p, at, max, sum);
    const uint64_t partial = (uint64_t(t.unit) * kRows + row) * most_groups + group;
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
      const int d = j * 128 + lane * 4;
      if (d >= p.head_dim) continue;
      if (groups == 1) {
        store4<T>(p.out, row_offset(p, t, at) + d, out[j], inverse);
      } else {
        *reinterpret_cast<float4*>(partials.outputs + partial * p.head_dim + d) = out[j];
      }
    }
    if (groups > 1 && lane == 0) partials.max_sums[partial] = make_float2(max, sum);
  }
  if (place.blocks > 1) arrive_cluster();  // this block has read the others' shared memory
  if (groups > 1) {
    __threadfence();          // this thread's partial results, before the block's arrival
    sync_some(id, kThreads);  // all threads' partial results
    bool last = false;
    if (threadIdx.x == 0) {
      const int counter = t.unit * place.blocks + place.rank;
      last = atomicInc(partials.counters - 1 - counter, groups - 1) == unsigned(groups - 1);
    }
    if (any_of_some(id, kThreads, last)) {
      __threadfence();  // the other clusters' results, after their arrival
      for (int row = begin + warp; row < end; row += kWarps) {
        const uint64_t base = (uint64_t(t.unit) * kRows + row) * most_groups;
        float max = -INFINITY, sum = 0.f;
        for (int i = lane; i < groups; i += kWarpSize) max = fmaxf(max, __ldcg(partials.max_sums + base + i).x);
        max = warp_max(max);
        float4 out[kQuads];
#pragma unroll
        for (int j = 0; j < kQuads; ++j) out[j] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
        for (int i = 0; i < groups; ++i) {
          const float2 max_sum = __ldcg(partials.max_sums + base + i);
          const float factor = exp2_below(max_sum.x, max);
          sum = fmaf(max_sum.y, factor, sum);
#pragma unroll
          for (int j = 0; j < kQuads; ++j) {
            const int d = j * 128 + lane * 4;
            if (d < p.head_dim) {
              const float* from = partials.outputs + (base + i) * p.head_dim + d;
              add_scaled(out[j], __ldcg(reinterpret_cast<const float4*>(from)), factor);
            }
          }
        }
        const RowPlace at = row_place(p, t, row);
        const float inverse = inverse_sum(p, at, max, sum);
#pragma unroll
        for (int j = 0; j < kQuads; ++j) {
          const int d = j * 128 + lane * 4;
          if (d < p.head_dim) store4<T>(p.out, row_offset(p, t, at) + d, out[j], inverse);
        }
      }
    }
  }
  if (place.blocks > 1) wait_cluster();
}

}  // namespace append
}  // namespace hf_fastpath
