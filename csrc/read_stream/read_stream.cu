// What: largest magnitude of a buffer: two cheap instructions a word, so that reading is all it costs. R of a
//   GPU is the size of a large buffer over the time of the fastest variant.
// Work split: kTile: one 32 KiB tile a block, block i reads tile i. kPersistent: as many blocks as fit at
//   once, block i reads tiles i, i + grid, ... kBulk: one block an SM; one thread keeps a ring of bulk copies
//   to shared memory full, 256 threads read what arrived. Elements outside the whole 16-byte chunks go to
//   block 0.
// Traffic: count * sizeof(T), each byte read once; one 4-byte atomic a block.
// Roofline: it is the measure of the read bandwidth. Nothing was measured yet.

#include <algorithm>

#include "common/async.cuh"
#include "common/cuda_check.cuh"
#include "common/numeric.cuh"
#include "common/warp.cuh"
#include "read_stream/read_stream.h"

namespace hf_fastpath {
namespace {

constexpr int kThreads = 256;  // eight blocks fill an SM's 2048 threads
constexpr int kWarps = kThreads / kWarpSize;
// 16-byte loads of a thread and tile. With 2048 threads on an SM even half of them in flight are 128 KiB,
// five times what latency * bandwidth asks for, so the compiler may keep to the 32 registers that allow 2048
// threads.
constexpr int kLoads = 8;
constexpr int kTileChunks = kThreads * kLoads;  // 32 KiB

constexpr int kSlotChunks = 1024;  // 16 KiB a bulk copy: large enough that issuing it costs nothing
constexpr int kSlotBytes = kSlotChunks * 16;
constexpr int kStages = 12;  // 192 KiB of the 227 KiB that a block may have: one block an SM

// The buffer cut into whole 16-byte chunks and the elements before and after them (fewer than a chunk's
// each).
template <class T>
struct Span {
  const T* data;
  int64_t head, chunks, tail;
  __device__ const T* chunk(int64_t i) const { return data + head + i * kVecElems<T>; }
};

// Without the sign the bits of floats are ordered like their values, NaN above infinity. `T` says whether a
// word is one magnitude or two.
template <class T>
__device__ __forceinline__ uint32_t max_word(uint32_t best, uint32_t word) {
  if constexpr (sizeof(T) == 4) {
    return max(best, word & 0x7fffffffu);
  } else {
    return __vmaxu2(best, word & 0x7fff7fffu);
  }
}

// The bits of one element, in the low half of the word when it has 16.
__device__ __forceinline__ uint32_t bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ uint32_t bits_of(__half x) { return __half_as_ushort(x); }
__device__ __forceinline__ uint32_t bits_of(__nv_bfloat16 x) { return __bfloat16_as_ushort(x); }

template <class T>
__device__ __forceinline__ uint32_t max_chunk(uint32_t best, uint4 v) {
  return max_word<T>(max_word<T>(max_word<T>(max_word<T>(best, v.x), v.y), v.z), v.w);
}

template <class T>
__device__ uint32_t max_edges(const Span<T>& span) {
  uint32_t best = 0;
  if (threadIdx.x < span.head) best = max_word<T>(best, bits_of(span.data[threadIdx.x]));
  if (threadIdx.x < span.tail) best = max_word<T>(best, bits_of(span.chunk(span.chunks)[threadIdx.x]));
  return best;
}

template <class T>
__device__ __forceinline__ uint32_t max_tile(const Span<T>& span, int64_t tile, uint32_t best) {
  using C = Chunk<T, kVecElems<T>>;
  const int64_t first = tile * kTileChunks + threadIdx.x;
  if ((tile + 1) * kTileChunks > span.chunks) {  // the last tile, in part
    for (int64_t i = first; i < span.chunks; i += kThreads) {
      best = max_chunk<T>(best, C::load_streaming(span.chunk(i)));
    }
    return best;
  }
  uint4 v[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) v[i] = C::load_streaming(span.chunk(first + i * kThreads));
#pragma unroll
  for (int i = 0; i < kLoads; ++i) best = max_chunk<T>(best, v[i]);
  return best;
}

// Raise *out to the block's largest magnitude. Magnitudes are not negative, so integer order is theirs; the
// order of the blocks does not matter to a maximum.
template <class T>
__device__ void raise_out(uint32_t best, float* out) {
  __shared__ uint32_t warp_bests[kWarps];
  if constexpr (sizeof(T) == 2) {  // the larger of the two, as the bits of a float32
    const uint32_t bits = max(best & 0xffffu, best >> 16);
    best = __float_as_uint(unpack2(bits, T()).x);
  }
  best = __reduce_max_sync(kAllLanes, best);
  if (threadIdx.x % kWarpSize == 0) warp_bests[threadIdx.x / kWarpSize] = best;
  __syncthreads();  // every warp's maximum is written
  if (threadIdx.x == 0) {
    for (uint32_t other : warp_bests) best = max(best, other);
    atomicMax(reinterpret_cast<unsigned int*>(out), best);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) read_tile_kernel(Span<T> span, float* out) {
  uint32_t best = blockIdx.x == 0 ? max_edges(span) : 0;
  raise_out<T>(max_tile(span, blockIdx.x, best), out);
}

template <class T>
__global__ void __launch_bounds__(kThreads) read_persistent_kernel(Span<T> span, float* out) {
  const int64_t tiles = (span.chunks + kTileChunks - 1) / kTileChunks;
  uint32_t best = blockIdx.x == 0 ? max_edges(span) : 0;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) best = max_tile(span, tile, best);
  raise_out<T>(best, out);
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}

__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void copy_slot(uint4* slot, const void* source, uint64_t* full) {
  const uint32_t barrier = shared_address(full);
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(kSlotBytes)
               : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(slot)),
      "l"(source), "r"(kSlotBytes), "r"(barrier)
      : "memory");
}
#endif

template <class T>
__global__ void __launch_bounds__(kThreads) read_bulk_kernel(Span<T> span, float* out) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint4 ring[];
  __shared__ uint64_t full[kStages], empty[kStages];
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(full + stage, 1);  // the thread that issues the copy; the bytes are counted besides
      barrier_init(empty + stage, kWarps);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // the copy engine sees the barriers
  }
  __syncthreads();  // and so do the other threads

  const int64_t slots = span.chunks / kSlotChunks;
  const int64_t mine = blockIdx.x < slots ? (slots - 1 - blockIdx.x) / gridDim.x + 1 : 0;
  const auto source = [&](int64_t n) { return span.chunk((blockIdx.x + n * gridDim.x) * kSlotChunks); };
  if (threadIdx.x == 0) {
    for (int64_t n = 0; n < kStages && n < mine; ++n) copy_slot(ring + n * kSlotChunks, source(n), full + n);
  }
  uint32_t best = 0;
  int stage = 0;
  uint32_t parity = 0;
  for (int64_t n = 0; n < mine; ++n) {
    barrier_wait(full + stage, parity);  // the bytes of this slot have arrived
    const uint4* slot = ring + stage * kSlotChunks;
#pragma unroll
    for (int i = 0; i < kSlotChunks / kThreads; ++i) {
      best = max_chunk<T>(best, slot[i * kThreads + threadIdx.x]);
    }
    __syncwarp();  // every lane has read its part before the warp gives the slot back
    if (threadIdx.x % kWarpSize == 0) barrier_arrive(empty + stage);
    if (threadIdx.x == 0 && n + kStages < mine) {
      barrier_wait(empty + stage, parity);  // every warp has read the slot that is about to be overwritten
      copy_slot(ring + stage * kSlotChunks, source(n + kStages), full + stage);
    }
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  if (blockIdx.x == 0) {
    using C = Chunk<T, kVecElems<T>>;
    for (int64_t i = slots * kSlotChunks + threadIdx.x; i < span.chunks; i += kThreads) {
      best = max_chunk<T>(best, C::load_streaming(span.chunk(i)));
    }
    best = max_word<T>(best, max_edges(span));
  }
  raise_out<T>(best, out);
#endif
}

template <class T>
Span<T> cut(const T* data, int64_t count) {
  const int64_t elems = kVecElems<T>;
  const int64_t past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(data) % 16 / sizeof(T));
  const int64_t head = std::min(count, (elems - past) % elems);
  return {data, head, (count - head) / elems, (count - head) % elems};
}

template <class T>
void launch(const T* data, int64_t count, ReadVariant variant, float* out, cudaStream_t stream) {
  const Span<T> span = cut(data, count);
  dim3 grid(1);
  const dim3 block(kThreads);
  size_t smem_bytes = 0;
  switch (variant) {
    case ReadVariant::kTile:
      grid.x = static_cast<unsigned>(std::max<int64_t>(1, (span.chunks + kTileChunks - 1) / kTileChunks));
      read_tile_kernel<T><<<grid, block, smem_bytes, stream>>>(span, out);
      break;
    case ReadVariant::kPersistent: {
      int blocks_per_sm = 0;
      HF_FASTPATH_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
          &blocks_per_sm, read_persistent_kernel<T>, kThreads, smem_bytes));
      grid.x = static_cast<unsigned>(multiprocessor_count() * blocks_per_sm);
      read_persistent_kernel<T><<<grid, block, smem_bytes, stream>>>(span, out);
      break;
    }
    case ReadVariant::kBulk:
      grid.x = static_cast<unsigned>(multiprocessor_count());
      smem_bytes = static_cast<size_t>(kStages) * kSlotBytes;
      allow_shared_memory(read_bulk_kernel<T>, smem_bytes);
      read_bulk_kernel<T><<<grid, block, smem_bytes, stream>>>(span, out);
      break;
  }
  HF_FASTPATH_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

void launch_read_stream(const void* data, int64_t count, DType dtype, ReadVariant variant, float* out,
                        cudaStream_t stream) {
  if (variant == ReadVariant::kBulk && !has_hopper_code()) {
    throw std::runtime_error(
        "hf_fastpath: read_stream: bulk copies need compute capability 9.0 and a library made for it: use 0 "
        "or 1");
  }
  HF_FASTPATH_CUDA_CHECK(cudaMemsetAsync(out, 0, sizeof(*out), stream));  // the least magnitude there is
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    launch(static_cast<const T*>(data), count, variant, out, stream);
  });
}

}  // namespace hf_fastpath
