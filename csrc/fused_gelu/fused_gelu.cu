// What: GELU (tanh approximation or erf) of every element.
// Work split: a block takes kThreads * kUnroll neighboring chunks of 16 bytes, a thread every kThreads-th of
//   them, its loads issued before the first use. Elements after the last whole chunk, or all of them when a
//   pointer is not 16-byte aligned, go one to a thread through the same kernel.
// Traffic: 2 * count * sizeof(T): one read, one write. Loads and stores use the caches normally, since the
//   layer before has often just written x and the layer after reads the result.
// Roofline: copy bandwidth. 96 % of a copy for float16 and float32, tanh approximation, 16000x3072; 86 % for
// float16,
//   erf (H200, 2026-11).

#include <algorithm>

#include "common/activation.cuh"
#include "common/cuda_check.cuh"
#include "common/numeric.cuh"
#include "fused_gelu/fused_gelu.h"

namespace hf_fastpath {
namespace {

constexpr int kThreads = 256;
// Chunks in flight a thread: more blocks for small inputs, more loads in flight for large ones.
constexpr int kUnrollSmall = 2, kUnrollLarge = 4;
// From here on (64 MB of 16-byte chunks) a grid of large tiles still is many waves.
constexpr int64_t kLargeChunks = int64_t(1) << 20;

template <class T, int kElems, int kUnroll, Activation kActivation>
__global__ void __launch_bounds__(kThreads) gelu_kernel(const T* x, T* out, int64_t chunks) {
  using C = Chunk<T, kElems>;
  const int64_t first = blockIdx.x * int64_t(kThreads * kUnroll) + threadIdx.x;
  typename C::Raw raw[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t i = first + u * kThreads;
    raw[u] = i < chunks ? C::load(x + i * kElems) : C::zero();
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t i = first + u * kThreads;
    float f[kElems];
    C::unpack(raw[u], f);
#pragma unroll
    for (int e = 0; e < kElems; ++e) f[e] = activate<kActivation>(f[e]);
    if (i < chunks) C::store(out + i * kElems, f);
  }
}

template <class T, int kElems, int kUnroll, Activation kActivation>
void launch(const T* x, T* out, int64_t chunks, cudaStream_t stream) {
  if (chunks == 0) return;
  const int64_t tile = kThreads * kUnroll;
  const dim3 grid(static_cast<unsigned>((chunks + tile - 1) / tile)), block(kThreads);
  const size_t smem_bytes = 0;
  gelu_kernel<T, kElems, kUnroll, kActivation><<<grid, block, smem_bytes, stream>>>(x, out, chunks);
  HF_FASTPATH_CUDA_CHECK(cudaGetLastError());
}

template <class T, Activation kActivation>
void launch_all(const T* x, T* out, int64_t count, cudaStream_t stream) {
  constexpr int kElems = kVecElems<T>;
  const int64_t chunks = is_aligned16(x) && is_aligned16(out) ? count / kElems : 0;
  if (chunks >= kLargeChunks) {
    launch<T, kElems, kUnrollLarge, kActivation>(x, out, chunks, stream);
  } else {
    launch<T, kElems, kUnrollSmall, kActivation>(x, out, chunks, stream);
  }
  const int64_t done = chunks * kElems;
  launch<T, 1, kUnrollSmall, kActivation>(x + done, out + done, count - done, stream);
}

}  // namespace

void launch_fused_gelu(const void* x, void* out, int64_t count, DType dtype, Activation activation,
                       cudaStream_t stream) {
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    if (activation == Activation::kGeluTanh) {
      launch_all<T, Activation::kGeluTanh>(static_cast<const T*>(x), static_cast<T*>(out), count, stream);
    } else {
      launch_all<T, Activation::kGelu>(static_cast<const T*>(x), static_cast<T*>(out), count, stream);
    }
  });
}

}  // namespace hf_fastpath
