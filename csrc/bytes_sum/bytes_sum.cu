// What: sum over words of 64 bits of what each adds at its place (bytes_sum_words.h), modulo 2^64, over many
//   tensors.
// Work split: tiles of 64 KiB; as many blocks as fit at once, block i takes tiles i, i + grid, ... The bytes
//   of a tile that do not make 16, or lie unaligned, are taken by words.
// Traffic: every byte once; an 8-byte atomic a block. The sum of integers does not depend on its order.
// Roofline: memory: a word is some eight instructions of a lane, where an SM has twelve lanes a byte of
//   bandwidth. Figures: docs/lab/ops.md.
#include <algorithm>

#include "bytes_sum/bytes_sum.h"
#include "bytes_sum/bytes_sum_words.h"
#include "common/cuda_check.cuh"
#include "common/warp.cuh"

namespace hf_fastpath {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kLoads = 8;       // of 16 bytes, that a thread has under way
constexpr int kTileRounds = 2;  // of these loads
constexpr int64_t kTileWords = int64_t(kThreads) * kLoads * kTileRounds * 2;
constexpr int64_t kTileBytes = kTileWords * kSumWordBytes;  // 64 KiB

// The sum over a whole tile, whose bytes are aligned.
__device__ __forceinline__ uint64_t sum_tile(const ulonglong2* pairs, int64_t place) {
  uint64_t sum = 0;
  uint64_t key = sum_key(place + 2 * threadIdx.x);
#pragma unroll
  for (int round = 0; round < kTileRounds; ++round) {
    ulonglong2 taken[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      taken[i] = __ldcs(pairs + (round * kLoads + i) * kThreads + threadIdx.x);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      sum += summand(taken[i].x, key) + summand(taken[i].y, key + kSumFactor);
      key += 2 * kThreads * kSumFactor;
    }
  }
  return sum;
}

// The sum over fewer bytes than a tile's, or over unaligned ones.
__device__ __forceinline__ uint64_t sum_part(const unsigned char* data, int64_t bytes, int64_t place) {
  uint64_t sum = 0;
  const int64_t words = words_of(bytes);
  const bool is_aligned = reinterpret_cast<uintptr_t>(data) % kSumWordBytes == 0;
  for (int64_t i = threadIdx.x; i < words; i += kThreads) {
    const int64_t left = bytes - i * kSumWordBytes;
    const unsigned char* word = data + i * kSumWordBytes;
    const uint64_t taken = is_aligned && left >= kSumWordBytes
                               ? *reinterpret_cast<const uint64_t*>(word)
                               : word_of(word, left < kSumWordBytes ? left : kSumWordBytes);
    sum += summand(taken, sum_key(place + i));
  }
  return sum;
}

__global__ void __launch_bounds__(kThreads)
    bytes_sum_kernel(const __grid_constant__ SumSpans spans, uint64_t* out) {
  uint64_t sum = 0;
  int64_t place = spans.place;
  int span = 0;
  for (int tile = blockIdx.x; tile < spans.first_tile[spans.count]; tile += gridDim.x) {
    for (; tile >= spans.first_tile[span + 1]; ++span) {
      place += words_of(spans.bytes[span]);
    }
    const int64_t begin = (tile - spans.first_tile[span]) * kTileBytes;
    const unsigned char* data = static_cast<const unsigned char*>(spans.data[span]) + begin;
    const int64_t bytes = spans.bytes[span] - begin, first = place + begin / kSumWordBytes;
    if (bytes >= kTileBytes && reinterpret_cast<uintptr_t>(data) % 16 == 0) {
      sum += sum_tile(reinterpret_cast<const ulonglong2*>(data), first);
    } else {
      sum += sum_part(data, bytes < kTileBytes ? bytes : kTileBytes, first);
    }
  }
  for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(kAllLanes, sum, lanes);
  __shared__ uint64_t sums[kWarps];
  if (threadIdx.x % kWarpSize == 0) sums[threadIdx.x / kWarpSize] = sum;
  __syncthreads();  // every warp's sum is written
  if (threadIdx.x == 0) {
    uint64_t all = 0;
    for (const uint64_t each : sums) all += each;
    atomicAdd(reinterpret_cast<unsigned long long*>(out), static_cast<unsigned long long>(all));
  }
}

}  // namespace

void launch_bytes_sum(SumSpans& spans, uint64_t* sum, cudaStream_t stream) {
  int64_t tiles = 0;
  for (int i = 0; i < spans.count; ++i) {
    spans.first_tile[i] = static_cast<int32_t>(tiles);
    tiles += (spans.bytes[i] + kTileBytes - 1) / kTileBytes;
  }
  spans.first_tile[spans.count] = static_cast<int32_t>(tiles);
  int blocks_per_sm = 0;
  HF_FASTPATH_CUDA_CHECK(
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_per_sm, bytes_sum_kernel, kThreads, 0));
  const int64_t grid = std::min<int64_t>(tiles, int64_t(multiprocessor_count()) * blocks_per_sm);
  bytes_sum_kernel<<<static_cast<unsigned>(grid), kThreads, 0, stream>>>(spans, sum);
  HF_FASTPATH_CUDA_CHECK(cudaGetLastError());
}

}  // namespace hf_fastpath
