// What: weight * norm(x) * activation(gate), or weight * norm(x * activation(gate)), over each group of each
//   row, in float32, rounded once.
// Work split: one block a group, up to 1024 threads of 1 or 2 chunks of 16 bytes held in registers; longer
//   groups are read twice. The product of x and activated gate is the same in both orders; only the sum of
//   squares differs.
// Traffic: 3 * rows * hidden_size * sizeof(T); the weight stays in L2.
// Roofline: latency of one load, one reduction and one store for the rows of a decode step. There the weight
//   comes out of memory while the kernel in front still runs.

#include "common/activation.cuh"
#include "common/async.cuh"
#include "common/inverse_root.cuh"
#include "common/numeric.cuh"
#include "common/warp.cuh"
#include "gated_rms_norm/gated_rms_norm.h"

namespace hf_fastpath {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kMaxChunks = 2;  // a thread keeps: groups of 16384 elements in 16 bits; more would be spilled

// Makes x its product with the activated gate; returns the sum of squares of what is normed.
template <int kElems>
__device__ __forceinline__ float gate_values(const GatedRmsNormParams& p, const float (&gate)[kElems],
                                             float (&x)[kElems]) {
  float squares = 0.f;
#pragma unroll
  for (int e = 0; e < kElems; ++e) {
    const float product = p.activation == GateActivation::kSilu ? x[e] * silu<true>(gate[e])
                                                                : times_sigmoid<true>(x[e], gate[e]);
    const float normed = p.gate_first ? product : x[e];
    squares = fmaf(normed, normed, squares);
    x[e] = product;
  }
  return squares;
}

// kChunks: that a thread keeps; 0: they are computed again for the output.
template <class T, int kElems, int kChunks>
__global__ void __launch_bounds__(kMaxThreads) gated_rms_norm_kernel(GatedRmsNormParams p) {
  using C = Chunk<T, kElems>;
  __shared__ float scratch[kWarpSize];
  const int columns = static_cast<int>(p.hidden_size / p.groups);
  const int64_t row = blockIdx.x / p.groups, first = blockIdx.x % p.groups * columns;
  const T* x = static_cast<const T*>(p.x) + row * p.x_stride + first;
  const T* gate = static_cast<const T*>(p.gate) + row * p.gate_stride + first;
  const T* weight = static_cast<const T*>(p.weight) + first;
  T* out = static_cast<T*>(p.out) + row * p.hidden_size + first;
  allow_next_kernel();
  if (!p.programmatic_launch) wait_for_previous_kernel();
  typename C::Raw raw_weight[kChunks > 0 ? kChunks : 1];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int i = (threadIdx.x + c * blockDim.x) * kElems;
    raw_weight[c] = i < columns ? C::load_l2(weight + i) : C::zero();
  }
  wait_for_previous_kernel();  // for x and gate

  const auto store = [&](int i, const float (&products)[kElems], float scale, typename C::Raw raw) {
    float factors[kElems], y[kElems];
    C::unpack(raw, factors);
#pragma unroll
    for (int e = 0; e < kElems; ++e) y[e] = products[e] * scale * factors[e];
    C::store(out + i, y);
  };
  const auto load = [&](int i, float (&products)[kElems]) {
    const typename C::Raw raw_x = C::load_l2(x + i), raw_gate = C::load_l2(gate + i);
    float gates[kElems];
    C::unpack(raw_x, products);
    C::unpack(raw_gate, gates);
    return gate_values(p, gates, products);
  };
  const auto scale_of = [&](float squares) {
    return inverse_root<T>(block_sum(squares, scratch) / columns + p.eps);
  };

  float squares = 0.f;
  if constexpr (kChunks > 0) {
    typename C::Raw raw_x[kChunks], raw_gate[kChunks];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int i = (threadIdx.x + c * blockDim.x) * kElems;
      raw_x[c] = i < columns ? C::load_l2(x + i) : C::zero();
      raw_gate[c] = i < columns ? C::load_l2(gate + i) : C::zero();
    }
    float products[kChunks][kElems];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      float gates[kElems];
      C::unpack(raw_x[c], products[c]);
      C::unpack(raw_gate[c], gates);
      squares += gate_values(p, gates, products[c]);
    }
    const float scale = scale_of(squares);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int i = (threadIdx.x + c * blockDim.x) * kElems;
      if (i < columns) store(i, products[c], scale, raw_weight[c]);
    }
  } else {
    float products[kElems];
    for (int i = threadIdx.x * kElems; i < columns; i += blockDim.x * kElems) squares += load(i, products);
    const float scale = scale_of(squares);
    for (int i = threadIdx.x * kElems; i < columns; i += blockDim.x * kElems) {
      load(i, products);
      store(i, products, scale, C::load_l2(weight + i));
    }
  }
}

template <class T, int kElems>
void launch(const GatedRmsNormParams& p, cudaStream_t stream) {
  const int64_t blocks = p.rows * p.groups, chunks = p.hidden_size / p.groups / kElems;
  // Few groups: the widest block, for the shortest latency. Many: two chunks a thread, so that more groups
  // are resident.
  const int64_t per_thread = blocks >= 4 * int64_t(multiprocessor_count()) ? kMaxChunks : 1;
  const int64_t warps = ((chunks + per_thread - 1) / per_thread + kWarpSize - 1) / kWarpSize;
  const int threads = static_cast<int>(warps * kWarpSize < kMaxThreads ? warps * kWarpSize : kMaxThreads);
  const int64_t need = (chunks + threads - 1) / threads;
  const auto kernel = need <= 1            ? gated_rms_norm_kernel<T, kElems, 1>
                      : need <= kMaxChunks ? gated_rms_norm_kernel<T, kElems, kMaxChunks>
                                           : gated_rms_norm_kernel<T, kElems, 0>;
  const dim3 grid(static_cast<unsigned>(blocks)), block(threads);
  const size_t smem_bytes = 0;
  const bool programmatic_launch = true;  // else the kernel waits before it reads
  HF_FASTPATH_CUDA_CHECK(
      launch_programmatic(kernel, grid, block, smem_bytes, stream, programmatic_launch, p));
}

}  // namespace

void launch_gated_rms_norm(const GatedRmsNormParams& p, cudaStream_t stream) {
  with_type(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kElems = kVecElems<T>;
    const bool one_row = p.rows == 1;
    const bool aligned = p.hidden_size / p.groups % kElems == 0 && is_aligned16(p.x) &&
                         is_aligned16(p.gate) && is_aligned16(p.weight) && is_aligned16(p.out) &&
                         (one_row || (p.x_stride % kElems == 0 && p.gate_stride % kElems == 0));
    return aligned ? launch<T, kElems>(p, stream) : launch<T, 1>(p, stream);
  });
}

}  // namespace hf_fastpath
