// Products of the blocks of a cluster, and how they send each other what they made.
#pragma once

#include "common/async.cuh"
#include "common/numeric.cuh"
#include "common/warp.cuh"

namespace hf_fastpath {

constexpr int kClusterThreads = 384;                               // that multiply
constexpr int kClusterBlockThreads = kClusterThreads + kWarpSize;  // and a warp for what else there is
constexpr int kClusterWarps = kClusterThreads / kWarpSize;

// A product [kRows] x [kRows, kColumns] of weights in shared memory by kClusterThreads threads: a thread has
// 16 bytes of every kRowLanes-th row.
template <class T, int kRows_, int kColumns_>
struct Product {
  static constexpr int kRows = kRows_, kColumns = kColumns_, kElems = kVecElems<T>;
  static constexpr int kGroups = kColumns / kElems;
  static constexpr int kRowLanes = kClusterThreads / kGroups;
  // Threads that add up one output, neighbors; rows of sums are so long that they read without bank
  // conflicts.
  static constexpr int kSplit = kClusterThreads >= 4 * kColumns ? 4 : kClusterThreads >= 2 * kColumns ? 2 : 1;
  static constexpr int kSumStride = kColumns + kWarpSize / kSplit % kWarpSize;
  static constexpr int kSumBytes = kRowLanes * kSumStride * int(sizeof(float));
  static_assert(kRowLanes % kSplit == 0 && kColumns % kElems == 0, "whole accesses");

  // Output of this thread, or at least kColumns.
  static __device__ __forceinline__ int output() { return threadIdx.x / kSplit; }

  // x @ weights for kVectors vectors x, in the kSplit threads of every output; all threads of the block come
  // here. Before sums are used again, a barrier has to follow.
  template <int kVectors>
  static __device__ __forceinline__ void run(const T* weights, const float* const (&x)[kVectors], float* sums,
                                             float (&totals)[kVectors]) {
    using C = Chunk<T, kElems>;
    const int tid = threadIdx.x, lane_row = tid / kGroups, column = (tid - lane_row * kGroups) * kElems;
    const int part = tid % kSplit;
    constexpr int kEach = (kRows + kRowLanes - 1) / kRowLanes;
    float acc[kVectors][kElems] = {};
    if (lane_row < kRowLanes && tid < kClusterThreads) {
      uint4 raw[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int r = lane_row + i * kRowLanes;
        raw[i] = r < kRows ? *reinterpret_cast<const uint4*>(weights + r * kColumns + column) : C::zero();
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int r = lane_row + i * kRowLanes;
        float w[kElems];
        C::unpack(raw[i], w);
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          const float value = r < kRows ? x[v][r] : 0.f;
#pragma unroll
          for (int e = 0; e < kElems; ++e) acc[v][e] = fmaf(w[e], value, acc[v][e]);
        }
      }
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (v > 0) __syncthreads();  // sums are free again
      if (lane_row < kRowLanes && tid < kClusterThreads) {
#pragma unroll
        for (int e = 0; e < kElems; e += 4) {
          *reinterpret_cast<float4*>(sums + lane_row * kSumStride + column + e) =
              make_float4(acc[v][e], acc[v][e + 1], acc[v][e + 2], acc[v][e + 3]);
        }
      }
      __syncthreads();  // sums of all rows
      totals[v] = 0.f;
      if (output() < kColumns) {
#pragma unroll
        for (int i = 0; i < kRowLanes / kSplit; ++i)
          totals[v] += sums[(i * kSplit + part) * kSumStride + output()];
      }
#pragma unroll
      for (int bit = 1; bit < kSplit; bit *= 2) totals[v] += __shfl_xor_sync(kAllLanes, totals[v], bit);
    }
  }
  static __device__ __forceinline__ float run(const T* weights, const float* x, float* sums) {
    float total[1];
    const float* const only[1] = {x};
    run<1>(weights, only, sums, total);
    return total[0];
  }
};

#if HF_FASTPATH_HOPPER
// Barriers for what the other blocks of the cluster send.
struct Inbox {
  uint32_t barrier;

  __device__ __forceinline__ void open(int bytes) const {  // by one thread, before the cluster knows of it
    barrier_init(barrier, 1);
    barrier_arrive_expect(barrier, bytes);
  }
  __device__ __forceinline__ void wait() const { barrier_wait(barrier, 0); }
  // Sends a value to the same place of block `rank`.
  __device__ __forceinline__ void send(float* to, int rank, float value) const {
    jitter();
    send_to_cluster(cluster_address(to, rank), value, cluster_address(barrier, rank));
  }
};
#endif

}  // namespace hf_fastpath
