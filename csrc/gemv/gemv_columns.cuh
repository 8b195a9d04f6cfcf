// What the kernels for weights stored [k, n] share: blocks of neighboring outputs, k split over warps and,
// where that gives too few blocks for the GPU, over the blocks of a cluster that merge through distributed
// shared memory (sm_90 and up) in block order: no atomics, no workspace. The first weights are asked for
// before the kernel in front is complete. A norm in front is computed by every block for itself; features may
// go to queries and KV cache instead of the output.
#pragma once

#include "common/async.cuh"
#include "common/cuda_check.cuh"
#include "common/inverse_root.cuh"
#include "gemv/gemv_device.cuh"
#include "rope_append/rope_append.cuh"

namespace hf_fastpath {

constexpr int kColumnWarps = 8;
constexpr int kColumnThreads = kColumnWarps * kWarpSize;
constexpr int64_t kMinRows = 96;  // weight rows a block should keep when k is split over a cluster
constexpr int kRowMultiple = 32;  // blocks' parts of k start on multiples of this, so that x stays aligned

// The part of k a block takes: rows [begin, end).
struct RowRange {
  int begin, end;
};

__device__ __forceinline__ RowRange row_range(int64_t k, int rank, int cluster) {
  const int64_t part = ((k + cluster - 1) / cluster + kRowMultiple - 1) / kRowMultiple * kRowMultiple;
  return {static_cast<int>(min(k, rank * part)), static_cast<int>(min(k, (rank + 1) * part))};
}

// How a launch runs over a shape.
struct ColumnsPlan {
  int cluster;  // blocks that split k
  bool append;  // the features go to queries and KV cache instead of the output
};

// norm(x) in shared memory, if the launch has a norm: rows `stride` elements apart, so that eight rows are
// read without bank conflicts.
template <class T>
struct NormedX {
  static constexpr int kElems = kVecElems<T>;
  static constexpr int kPad = 64 / static_cast<int>(sizeof(T));
  T* rows;  // null without a norm
  int k, m;

  static size_t bytes(const GemvParams& p) {
    return p.norm.kind == NormKind::kNone ? 0 : (p.m + 2) * (p.k + kPad) * sizeof(T);
  }
  __device__ __forceinline__ NormedX(const GemvParams& p, char* shared)
      : rows(p.norm.kind == NormKind::kNone ? nullptr : reinterpret_cast<T*>(shared)), k(p.k), m(p.m) {}

  __device__ __forceinline__ T* at(int row, int i) const { return rows + row * (k + kPad) + i; }

  // Brings the norm's parameters: before x is there.
  __device__ __forceinline__ void load_parameters(const GemvNorm& norm) const {
    using C = Chunk<T, kElems>;
    if (!rows) return;
    for (int i = threadIdx.x * kElems; i < k; i += kColumnThreads * kElems) {
      *reinterpret_cast<uint4*>(at(m, i)) = C::load_readonly(static_cast<const T*>(norm.weight) + i);
      if (norm.bias)
        *reinterpret_cast<uint4*>(at(m + 1, i)) = C::load_readonly(static_cast<const T*>(norm.bias) + i);
    }
  }

  // Brings x and norms it, rounded to T as the norm by itself does. Ends with a barrier.
  __device__ __forceinline__ void load(const GemvParams& p) const {
    using C = Chunk<T, kElems>;
    if (!rows) return;
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    for (int row = 0; row < m; ++row) {
      const T* x = static_cast<const T*>(p.x) + int64_t(row) * k;
      for (int i = threadIdx.x * kElems; i < k; i += kColumnThreads * kElems)
        *reinterpret_cast<uint4*>(at(row, i)) = C::load_l2(x + i);
    }
    __syncthreads();  // x and the parameters
    const bool centered = p.norm.kind == NormKind::kLayer;
    for (int row = warp; row < m; row += kColumnWarps) {
      float sum = 0.f, squares = 0.f, v[kElems];
      if (centered) {
        for (int i = lane * kElems; i < k; i += kWarpSize * kElems) {
          C::unpack(*reinterpret_cast<const uint4*>(at(row, i)), v);
#pragma unroll
          for (int e = 0; e < kElems; ++e) sum += v[e];
        }
      }
      const float mean = centered ? warp_sum(sum) / k : 0.f;
      for (int i = lane * kElems; i < k; i += kWarpSize * kElems) {
        C::unpack(*reinterpret_cast<const uint4*>(at(row, i)), v);
#pragma unroll
        for (int e = 0; e < kElems; ++e) squares = fmaf(v[e] - mean, v[e] - mean, squares);
      }
      const float scale = inverse_root<T>(warp_sum(squares) / k + p.norm.eps);
      for (int i = lane * kElems; i < k; i += kWarpSize * kElems) {
        float weight[kElems], bias[kElems] = {};
        C::unpack(*reinterpret_cast<const uint4*>(at(row, i)), v);
        C::unpack(*reinterpret_cast<const uint4*>(at(m, i)), weight);
        if (p.norm.bias) C::unpack(*reinterpret_cast<const uint4*>(at(m + 1, i)), bias);
#pragma unroll
        for (int e = 0; e < kElems; ++e) v[e] = (v[e] - mean) * scale * weight[e] + bias[e];
        C::store(at(row, i), v);
      }
    }
    __syncthreads();  // the normed rows
  }
};

// What the block's outputs add to their sums: outputs i, i + kColumnThreads, ... of the block are a thread's.
template <class T, int kX, int kColumns>
struct ColumnAddends {
  static constexpr int kPerThread = (kX * kColumns + kColumnThreads - 1) / kColumnThreads;
  Addends<T> values[kPerThread];
};

// Loaded before the weights, so that their latency hides; only the block that writes the outputs needs them.
template <class T, int kX, int kColumns>
__device__ __forceinline__ ColumnAddends<T, kX, kColumns> load_column_addends(const GemvParams& p, int rank,
                                                                              int first_column) {
  ColumnAddends<T, kX, kColumns> addends;
#pragma unroll
  for (int j = 0; j < ColumnAddends<T, kX, kColumns>::kPerThread; ++j) {
    const int i = threadIdx.x + j * kColumnThreads, m = i / kColumns, n = first_column + i % kColumns;
    if (rank == 0 && m < p.m && n < p.n) addends.values[j] = load_addends<T>(p, m, n);
  }
  return addends;
}

// Largest cluster whose blocks' totals fit beside a block's own sums in shared memory.
template <int kX, int kColumns>
constexpr int kClusterLimit = kX * kColumns > 512 ? kMaxCluster / 2 : kMaxCluster;

// Sums over the warps, then over the blocks of the cluster, always in the same order, and writes the outputs
// [m, first_column + c]. Every thread calls it once its sums are written and after arrive_cluster(), so that
// no block is written to before it runs; kX is at least p.m. The blocks push their totals to the first one
// and are done: a pull would wait for a round trip and keep them until it ends.
template <class T, int kX, int kColumns>
__device__ __forceinline__ void merge_columns(const GemvParams& p,
                                              const float (&sums)[kColumnWarps][kX][kColumns],
                                              const ColumnAddends<T, kX, kColumns>& addends,
                                              const RopeAppendParams& rope, const AppendSlots& slots,
                                              const ColumnsPlan& plan, int rank, int first_column) {
  const int cluster = plan.cluster;
  constexpr int kPerThread = ColumnAddends<T, kX, kColumns>::kPerThread;
  constexpr int kOthers = kClusterLimit<kX, kColumns> - 1;
  __shared__ float totals[kOthers][kX][kColumns];  // of the cluster's other blocks
  if (cluster > 1) wait_cluster();                 // all blocks run
  __syncthreads();                                 // every warp's sums
  float total[kPerThread];
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const int i = threadIdx.x + j * kColumnThreads, m = i / kColumns, c = i % kColumns;
    total[j] = 0.f;
    if (m >= p.m) continue;
#pragma unroll
    for (int w = 0; w < kColumnWarps; ++w) total[j] += sums[w][m][c];
    if (rank > 0) store_cluster(cluster_address(&totals[rank - 1][m][c], 0), total[j]);
  }
  if (cluster > 1) {
    __syncwarp();  // the barrier's halves want whole warps
    arrive_cluster();
    if (rank > 0) return;
    wait_cluster();  // every block's totals
  }
  trace(TracePoint::kMerged);
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const int i = threadIdx.x + j * kColumnThreads, m = i / kColumns, c = i % kColumns, n = first_column + c;
    if (m >= p.m || n >= p.n) continue;
#pragma unroll
    for (int other = 0; other < kOthers; ++other) {
      if (other < cluster - 1) total[j] += totals[other][m][c];
    }
    if (plan.append) {
      store_feature<T>(rope, slots.place, slots.slots[m], m, n, total[j] + to_float(addends.values[j].bias));
    } else {
      finish<T>(p, m, n, total[j], addends.values[j]);
    }
  }
}

// Blocks that split k for `column_blocks` blocks of outputs on this GPU.
inline int choose_cluster(const GemvParams& p, int column_blocks, int limit) {
  if (!has_hopper_code()) return 1;
  const int64_t wanted = multiprocessor_count();
  int cluster = 1;
  while (cluster < limit && column_blocks * cluster < wanted && p.k / (2 * cluster) >= kMinRows) cluster *= 2;
  return cluster;
}

using ColumnsKernel = void (*)(GemvParams, RopeAppendParams, ColumnsPlan);

// Launches `kernel` over column_blocks clusters.
template <class T>
void launch_columns_kernel(ColumnsKernel kernel, const GemvParams& p, const RopeAppendParams* rope,
                           int column_blocks, int cluster, cudaStream_t stream) {
  const dim3 grid(column_blocks * cluster), block(kColumnThreads);
  const size_t smem_bytes = NormedX<T>::bytes(p);
  allow_shared_memory(kernel, smem_bytes);
  HF_FASTPATH_CUDA_CHECK(launch_clusters(kernel, grid, block, smem_bytes, stream, p.programmatic_launch,
                                         cluster, p, rope ? *rope : RopeAppendParams{},
                                         ColumnsPlan{cluster, rope != nullptr}));
}

}  // namespace hf_fastpath
