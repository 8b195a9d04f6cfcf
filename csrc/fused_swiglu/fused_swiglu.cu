// What: activation(gate) * up, element by element; gate and up may be the halves of one projection.
// Work split: grid.x covers a row in tiles of kThreads * kUnroll chunks of 16 bytes, grid.y the rows
//   (contiguous inputs are one long row); a thread takes every kThreads-th chunk of its tile, its loads
//   issued before the first use. What is left after the last whole chunk, and inputs whose rows are not
//   16-byte aligned, go element by element through the same kernel. A row may have one gate for all. A block
//   starts while the kernel in front ends: with few rows, that is most of its time.
// Traffic: 3 * count * sizeof(T): two reads, one write.
// Roofline: copy bandwidth. 90 % of read bandwidth for float16, 16000x3072 (H200, 2026-11).

#include <algorithm>

#include "common/activation.cuh"
#include "common/async.cuh"
#include "common/cuda_check.cuh"
#include "common/numeric.cuh"
#include "fused_swiglu/fused_swiglu.h"

namespace hf_fastpath {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 2;  // two inputs: four loads in flight a thread
constexpr int64_t kMaxGridY = 65535;

// gate and up in, out out; strides in elements between rows, `chunks` of kElems elements a row.
template <class T>
struct Params {
  const T* gate;
  const T* up;
  T* out;
  int64_t rows, chunks, gate_stride, up_stride, out_stride;
  bool one_gate;  // of a whole row
};

// kGate: an Activation, as a number: nvcc cannot launch templates with one that has no name in its enum.
template <int kGate>
__device__ __forceinline__ float gated(float gate, float up) {
  constexpr Activation kActivation{kGate};
  // Accurate: where a gate is nearly shut, what goes through it may still be large.
  if constexpr (kActivation == kSigmoid) return times_sigmoid<true>(up, gate);
  return activate<kActivation>(gate) * up;
}

template <class T, int kElems, int kGate>
__global__ void __launch_bounds__(kThreads) swiglu_kernel(Params<T> p) {
  using C = Chunk<T, kElems>;
  const int64_t first = blockIdx.x * int64_t(kThreads * kUnroll) + threadIdx.x;
  allow_next_kernel();
  wait_for_previous_kernel();  // gate and up
  for (int64_t row = blockIdx.y; row < p.rows; row += gridDim.y) {
    typename C::Raw gate[kUnroll], up[kUnroll];
    const float of_row = p.one_gate ? to_float(Chunk<T, 1>::load_l2(p.gate + row * p.gate_stride)) : 0.f;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = first + u * kThreads;
      gate[u] =
          i < p.chunks && !p.one_gate ? C::load_l2(p.gate + row * p.gate_stride + i * kElems) : C::zero();
      up[u] = i < p.chunks ? C::load_l2(p.up + row * p.up_stride + i * kElems) : C::zero();
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = first + u * kThreads;
      float g[kElems], v[kElems];
      C::unpack(gate[u], g);
      C::unpack(up[u], v);
#pragma unroll
      for (int e = 0; e < kElems; ++e) g[e] = gated<kGate>(p.one_gate ? of_row : g[e], v[e]);
      if (i < p.chunks) C::store(p.out + row * p.out_stride + i * kElems, g);
    }
  }
}

template <class T, int kElems, int kGate>
void launch(const Params<T>& p, cudaStream_t stream) {
  if (p.chunks == 0 || p.rows == 0) return;
  const int64_t tile = kThreads * kUnroll;
  const dim3 grid(static_cast<unsigned>((p.chunks + tile - 1) / tile),
                  static_cast<unsigned>(std::min(p.rows, kMaxGridY)));
  const dim3 block(kThreads);
  const size_t smem_bytes = 0;
  const bool programmatic_launch = true;  // the kernel waits before it reads
  HF_FASTPATH_CUDA_CHECK(launch_programmatic(swiglu_kernel<T, kElems, kGate>, grid, block, smem_bytes, stream,
                                             programmatic_launch, p));
}

template <class T, Activation kActivation>
void launch_all(Params<T> p, int64_t columns, cudaStream_t stream) {
  constexpr int kElems = kVecElems<T>;
  const bool one_row = p.rows == 1;
  const auto fits = [&](const T* start, int64_t stride) {
    return is_aligned16(start) && (one_row || stride % kElems == 0);
  };
  const bool aligned =
      (p.one_gate || fits(p.gate, p.gate_stride)) && fits(p.up, p.up_stride) && fits(p.out, p.out_stride);
  p.chunks = aligned ? columns / kElems : 0;
  launch<T, kElems, int(kActivation)>(p, stream);
  const int64_t done = p.chunks * kElems;
  p.gate += p.one_gate ? 0 : done, p.up += done, p.out += done;
  p.chunks = columns - done;
  launch<T, 1, int(kActivation)>(p, stream);
}

}  // namespace

void launch_fused_swiglu(const void* gate, const void* up, void* out, int64_t rows, int64_t columns,
                         int64_t gate_stride, int64_t up_stride, bool one_gate, DType dtype,
                         Activation activation, cudaStream_t stream) {
  const bool contiguous = !one_gate && gate_stride == columns && up_stride == columns;
  const int64_t count = rows * columns;
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    Params<T> p{static_cast<const T*>(gate), static_cast<const T*>(up), static_cast<T*>(out)};
    p.rows = contiguous ? 1 : rows;
    const int64_t row_elems = contiguous ? count : columns;
    p.gate_stride = gate_stride, p.up_stride = up_stride, p.out_stride = columns, p.one_gate = one_gate;
    if (activation == kSigmoid) return launch_all<T, kSigmoid>(p, row_elems, stream);
    switch (activation) {
      case Activation::kSilu:
        return launch_all<T, Activation::kSilu>(p, row_elems, stream);
      case Activation::kGeluTanh:
        return launch_all<T, Activation::kGeluTanh>(p, row_elems, stream);
      default:
        return launch_all<T, Activation::kGelu>(p, row_elems, stream);
    }
  });
}

}  // namespace hf_fastpath
