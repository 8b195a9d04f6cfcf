// What the kernels for weights stored [k, n] share: blocks of neighboring outputs, k split over warps and, where
// that gives too few blocks for the GPU, over the blocks of a cluster that merge through distributed shared memory
// (sm_90 and up) in block order: no atomics, no workspace.
#pragma once

#include <cooperative_groups.h>

#include "common/cuda_check.cuh"
#include "gemv/gemv_device.cuh"

namespace hf_fastpath {

constexpr int kColumnWarps = 8;
constexpr int kColumnThreads = kColumnWarps * kWarpSize;
constexpr int kMaxCluster = 8;     // largest cluster every GPU with clusters takes
constexpr int64_t kMinRows = 128;  // weight rows a block should keep when k is split over a cluster
constexpr int kRowMultiple = 32;   // blocks' parts of k start on multiples of this, so that x stays aligned

// The part of k a block takes: rows [begin, end).
struct RowRange {
  int begin, end;
};

__device__ __forceinline__ RowRange row_range(int64_t k, int rank, int cluster) {
  const int64_t part = ((k + cluster - 1) / cluster + kRowMultiple - 1) / kRowMultiple * kRowMultiple;
  return {static_cast<int>(min(k, rank * part)), static_cast<int>(min(k, (rank + 1) * part))};
}

// What the block's outputs add to their sums: outputs i, i + kColumnThreads, ... of the block are a thread's.
template <int kX, int kColumns>
struct ColumnAddends {
  static constexpr int kPerThread = (kX * kColumns + kColumnThreads - 1) / kColumnThreads;
  Addends values[kPerThread];
};

// Loaded before the weights, so that their latency hides; only the block that writes the outputs needs them.
template <class T, int kX, int kColumns>
__device__ __forceinline__ ColumnAddends<kX, kColumns> load_column_addends(const GemvParams& p, int rank,
                                                                           int first_column) {
  ColumnAddends<kX, kColumns> addends;
#pragma unroll
  for (int j = 0; j < ColumnAddends<kX, kColumns>::kPerThread; ++j) {
    const int i = threadIdx.x + j * kColumnThreads, m = i / kColumns, n = first_column + i % kColumns;
    if (rank == 0 && m < p.m && n < p.n) addends.values[j] = load_addends<T>(p, m, n);
  }
  return addends;
}

// Sums over the warps, then over the blocks of the cluster, always in the same order, and writes the outputs
// [m, first_column + c]. Every thread calls it once its sums are written; kX is at least p.m.
template <class T, int kX, int kColumns>
__device__ __forceinline__ void merge_columns(const GemvParams& p, const float (&sums)[kColumnWarps][kX][kColumns],
                                              const ColumnAddends<kX, kColumns>& addends, int cluster, int rank,
                                              int first_column) {
  constexpr int kPerThread = ColumnAddends<kX, kColumns>::kPerThread;
  __shared__ float totals[kX][kColumns];
  __syncthreads();  // every warp's sums
  float total[kPerThread];
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const int i = threadIdx.x + j * kColumnThreads, m = i / kColumns, c = i % kColumns;
    total[j] = 0.f;
    if (m >= p.m) continue;
#pragma unroll
    for (int w = 0; w < kColumnWarps; ++w) total[j] += sums[w][m][c];
    if (rank > 0) totals[m][c] = total[j];
  }
#if __CUDA_ARCH__ >= 900
  const cooperative_groups::cluster_group blocks = cooperative_groups::this_cluster();
  if (cluster > 1) blocks.sync();  // every block's totals
#endif
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const int i = threadIdx.x + j * kColumnThreads, m = i / kColumns, c = i % kColumns, n = first_column + c;
    if (rank > 0 || m >= p.m || n >= p.n) continue;
#if __CUDA_ARCH__ >= 900
    float others[kMaxCluster];
#pragma unroll  // all loads at once: each goes to another SM
    for (int other = 1; other < kMaxCluster; ++other) {
      others[other] = other < cluster ? *blocks.map_shared_rank(&totals[m][c], other) : 0.f;
    }
#pragma unroll
    for (int other = 1; other < kMaxCluster; ++other) total[j] += others[other];
#endif
    finish<T>(p, m, n, total[j], addends.values[j]);
  }
#if __CUDA_ARCH__ >= 900
  if (cluster > 1) blocks.sync();  // no block may leave while its shared memory is read
#endif
}

// Blocks that split k for `column_blocks` blocks of outputs on this GPU.
inline int choose_cluster(const GemvParams& p, int column_blocks) {
  if (compute_capability_major() < 9) return 1;
  const int64_t wanted = multiprocessor_count();
  int cluster = 1;
  while (cluster < kMaxCluster && column_blocks * cluster < wanted && p.k / (2 * cluster) >= kMinRows) cluster *= 2;
  return cluster;
}

// Launches kernel(params, cluster) over column_blocks clusters.
inline void launch_columns_kernel(void (*kernel)(GemvParams, int), const GemvParams& p, int column_blocks,
                                  int cluster, cudaStream_t stream) {
  const dim3 grid(column_blocks * cluster), block(kColumnThreads);
  const size_t smem_bytes = 0;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = cluster;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = cluster > 1 ? 1 : 0;
  HF_FASTPATH_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, p, cluster));
}

}  // namespace hf_fastpath
