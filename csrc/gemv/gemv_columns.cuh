// What the kernels for weights stored [k, n] share: blocks of neighboring outputs, k split over warps and,
// where that gives too few blocks for the GPU, over the blocks of a cluster that merge through distributed
// shared memory (sm_90 and up) in block order: no atomics, no workspace.
#pragma once

#include "common/cuda_check.cuh"
#include "gemv/gemv_device.cuh"

namespace hf_fastpath {

constexpr int kColumnWarps = 8;
constexpr int kColumnThreads = kColumnWarps * kWarpSize;
constexpr int kMaxCluster = 8;    // largest cluster every GPU with clusters takes
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

// Cluster barrier in halves, sm_90 and up. What a thread wrote before arriving is visible after the others'
// wait.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Stores to the same variable in the shared memory of the cluster's first block.
__device__ __forceinline__ void store_to_first_block(float* p, float value) {
#if __CUDA_ARCH__ >= 900
  const uint32_t here = static_cast<uint32_t>(__cvta_generic_to_shared(p));
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(there) : "r"(here));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(value) : "memory");
#endif
}

// First thing in the kernel: merge_columns waits for it, so that no block is written to before it runs.
__device__ __forceinline__ void announce_block(int cluster) {
  if (cluster > 1) cluster_arrive();
}

// Sums over the warps, then over the blocks of the cluster, always in the same order, and writes the outputs
// [m, first_column + c]. Every thread calls it once its sums are written; kX is at least p.m. The blocks push
// their totals to the first one and are done: a pull would wait for a round trip and keep them until it ends.
template <class T, int kX, int kColumns>
__device__ __forceinline__ void merge_columns(const GemvParams& p,
                                              const float (&sums)[kColumnWarps][kX][kColumns],
                                              const ColumnAddends<T, kX, kColumns>& addends, int cluster,
                                              int rank, int first_column) {
  constexpr int kPerThread = ColumnAddends<T, kX, kColumns>::kPerThread;
  constexpr int kOthers = kClusterLimit<kX, kColumns> - 1;
  __shared__ float totals[kOthers][kX][kColumns];  // of the cluster's other blocks
  if (cluster > 1) cluster_wait();                 // all blocks run
  __syncthreads();                                 // every warp's sums
  float total[kPerThread];
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const int i = threadIdx.x + j * kColumnThreads, m = i / kColumns, c = i % kColumns;
    total[j] = 0.f;
    if (m >= p.m) continue;
#pragma unroll
    for (int w = 0; w < kColumnWarps; ++w) total[j] += sums[w][m][c];
    if (rank > 0) store_to_first_block(&totals[rank - 1][m][c], total[j]);
  }
  if (cluster > 1) {
    __syncwarp();  // the barrier's halves want whole warps
    cluster_arrive();
    if (rank > 0) return;
    cluster_wait();  // every block's totals
  }
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const int i = threadIdx.x + j * kColumnThreads, m = i / kColumns, c = i % kColumns, n = first_column + c;
    if (m >= p.m || n >= p.n) continue;
#pragma unroll
    for (int other = 0; other < kOthers; ++other) {
      if (other < cluster - 1) total[j] += totals[other][m][c];
    }
    finish<T>(p, m, n, total[j], addends.values[j]);
  }
}

// Blocks that split k for `column_blocks` blocks of outputs on this GPU.
inline int choose_cluster(const GemvParams& p, int column_blocks, int limit) {
  if (compute_capability_major() < 9) return 1;
  const int64_t wanted = multiprocessor_count();
  int cluster = 1;
  while (cluster < limit && column_blocks * cluster < wanted && p.k / (2 * cluster) >= kMinRows) cluster *= 2;
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
