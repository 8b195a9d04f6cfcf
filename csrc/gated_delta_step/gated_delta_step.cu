// What: gates, norms of q and k, and for each head S = g S + k (beta (v - k^T g S))^T with the result q^T S,
//   all in float32; the result is rounded once.
// Work split: a block takes a slice of a head's columns, 32 of them where accesses are whole, and keeps it in
//   registers: a row of a slice is a line of memory, which eight threads read. One exchange in shared memory
//   sums all that is summed over rows: k^T g S and q^T g S of k and q as they come, and the products that
//   their norms and q^T S are made of; norms are factors of these sums.
// Traffic: the state once in each direction, 2 * 4 * k_dim * v_dim bytes a head; all else is a few KB.
// Roofline: memory bandwidth: all of a state of 32 heads of 128 x 128 is on its way at once, in one wave of
//   blocks. What does not come of the kernel in front, the state among it, is asked for while that still
//   runs.
// Experiments: docs/lab/recording.md

#include "common/async.cuh"
#include "common/heads.cuh"
#include "common/inverse_root.cuh"
#include "common/warp.cuh"
#include "gated_delta_step/gated_delta_step.h"

namespace hf_fastpath {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kAcross = 8;                       // threads along a row of a slice
constexpr int kRowsAtOnce = kThreads / kAcross;  // of the state
static_assert(kMaxDeltaKey <= kThreads, "a thread computes the decay of a row");

// Sums over the rows of a head.
struct RowProducts {
  float q_q, k_k, q_k;
};

// kRows: rows of the state that a thread keeps.
template <class T, int kElems, int kRows>
__global__ void __launch_bounds__(kThreads) gated_delta_kernel(GatedDeltaParams p, int slices) {
  using S = Chunk<float, kElems>;
  constexpr int kColumns = kAcross * kElems;
  __shared__ __align__(16) float known_of[kWarps][kColumns], read_of[kWarps][kColumns];
  __shared__ RowProducts products_of[kWarps];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int k_dim = static_cast<int>(p.k_dim), v_dim = static_cast<int>(p.v_dim);
  const int heads = static_cast<int>(p.v_heads);
  const int head_of_all = blockIdx.x / slices, slice = blockIdx.x % slices;
  const int row = head_of_all / heads, head = head_of_all % heads;
  const int k_head = head / (heads / static_cast<int>(p.k_heads));
  const int place = threadIdx.x % kAcross * kElems, column = slice * kColumns + place;
  const int first_row = threadIdx.x / kAcross;
  float* state = p.state + int64_t(head_of_all) * k_dim * v_dim + column;
  const auto is_mine = [&](int r) { return r < k_dim && column < v_dim; };

  allow_next_kernel();
  if (!p.programmatic_launch) wait_for_previous_kernel();
  typename S::Raw raw[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int r = first_row + i * kRowsAtOnce;
    raw[i] = is_mine(r) ? S::load_l2(state + int64_t(r) * v_dim) : S::zero();
  }
  // The decay that this thread computes: of a row, or the only one.
  const int decay_row = p.per_element ? min(static_cast<int>(threadIdx.x), k_dim - 1) : 0;
  const float bias = load_float_l2(p.dt_bias, p.per_element ? int64_t(head) * k_dim + decay_row : head);
  const float rate = expf(load_float_l2(p.a_log, head));
  wait_for_previous_kernel();  // for q, k, v and the gates

  const T* q_row = head_of<T>(p.q, row, k_head);
  const T* k_row = head_of<T>(p.k, row, k_head);
  const T* v_row = head_of<T>(p.v, row, head) + min(column, v_dim - kElems);
  float q[kRows], k[kRows], v[kElems];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int r = min(first_row + i * kRowsAtOnce, k_dim - 1);
    q[i] = load_float_l2(q_row + r);
    k[i] = load_float_l2(k_row + r);
  }
  float decay[kRows];
  decay[0] = load_float_l2(head_of<T>(p.a, row, head) + decay_row) + bias;
  const float beta_logit = load_float_l2(head_of<T>(p.b, row, head));
#pragma unroll
  for (int e = 0; e < kElems; ++e) v[e] = load_float_l2(v_row + e);
  decay[0] = expf(-rate * softplus(decay[0]));
#pragma unroll
  for (int i = 1; i < kRows; ++i) decay[i] = decay[0];
  if (p.per_element) {
    __shared__ float decay_of[kThreads];
    decay_of[threadIdx.x] = decay[0];
    __syncthreads();  // every row's decay
#pragma unroll
    for (int i = 0; i < kRows; ++i) decay[i] = decay_of[first_row + i * kRowsAtOnce];
  }

  RowProducts products = {};
  float values[kRows][kElems], known[kElems] = {}, read[kElems] = {};
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (first_row + i * kRowsAtOnce >= k_dim) q[i] = k[i] = 0.f;
    products.q_q = fmaf(q[i], q[i], products.q_q);
    products.k_k = fmaf(k[i], k[i], products.k_k);
    products.q_k = fmaf(q[i], k[i], products.q_k);
    S::unpack(raw[i], values[i]);
#pragma unroll
    for (int e = 0; e < kElems; ++e) {
      values[i][e] *= decay[i];
      known[e] = fmaf(k[i], values[i][e], known[e]);
      read[e] = fmaf(q[i], values[i][e], read[e]);
    }
  }
  const auto sum_over_lanes = [](float& x, int offset) { x += __shfl_xor_sync(kAllLanes, x, offset); };
#pragma unroll
  for (int offset = kAcross; offset < kWarpSize; offset *= 2) {
#pragma unroll
    for (int e = 0; e < kElems; ++e) sum_over_lanes(known[e], offset), sum_over_lanes(read[e], offset);
    sum_over_lanes(products.q_q, offset), sum_over_lanes(products.k_k, offset);
    sum_over_lanes(products.q_k, offset);
  }
  if (lane < kAcross) {
    S::store(&known_of[warp][place], known);
    S::store(&read_of[warp][place], read);
  }
  if (lane == 0) products_of[warp] = products;
  __syncthreads();  // every warp's sums are written
  const auto sum_over_warps = [&](const float (&of)[kWarps][kColumns], float (&sums)[kElems]) {
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      float more[kElems];
      S::unpack(S::load(&of[w][place]), more);
#pragma unroll
      for (int e = 0; e < kElems; ++e) sums[e] = w == 0 ? more[e] : sums[e] + more[e];
    }
  };
  float delta[kElems];
  sum_over_warps(known_of, delta);
  products = {};
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const RowProducts more = products_of[w];
    products.q_q += more.q_q, products.k_k += more.k_k, products.q_k += more.q_k;
  }
  float q_factor = p.scale, k_factor = 1.f;
  if (p.l2_norm) {
    q_factor *= inverse_root<T>(products.q_q + kL2Eps);
    k_factor = inverse_root<T>(products.k_k + kL2Eps);
  }
  const float beta = __fdividef(p.beta_scale, 1.f + expf(-beta_logit));
#pragma unroll
  for (int e = 0; e < kElems; ++e) delta[e] = beta * (v[e] - k_factor * delta[e]);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int r = first_row + i * kRowsAtOnce;
    if (!is_mine(r)) continue;
#pragma unroll
    for (int e = 0; e < kElems; ++e) values[i][e] = fmaf(k_factor * k[i], delta[e], values[i][e]);
    S::store(state + int64_t(r) * v_dim, values[i]);
  }
  if (threadIdx.x >= kAcross || column >= v_dim) return;
  sum_over_warps(read_of, read);
  const float overlap = q_factor * k_factor * products.q_k;
  T* out = static_cast<T*>(p.out) + int64_t(head_of_all) * v_dim + column;
#pragma unroll
  for (int e = 0; e < kElems; ++e) out[e] = from_float<T>(fmaf(overlap, delta[e], q_factor * read[e]));
}

template <class T, int kElems>
void launch(const GatedDeltaParams& p, cudaStream_t stream) {
  constexpr int kColumns = kAcross * kElems;
  const int64_t slices = (p.v_dim + kColumns - 1) / kColumns;
  const auto kernel = p.k_dim <= kRowsAtOnce       ? gated_delta_kernel<T, kElems, 1>
                      : p.k_dim <= 2 * kRowsAtOnce ? gated_delta_kernel<T, kElems, 2>
                      : p.k_dim <= 4 * kRowsAtOnce ? gated_delta_kernel<T, kElems, 4>
                                                   : gated_delta_kernel<T, kElems, 8>;
  static_assert(kMaxDeltaKey == 8 * kRowsAtOnce, "the last kernel takes every key");
  const dim3 grid(static_cast<unsigned>(p.batch * p.v_heads * slices)), block(kThreads);
  const size_t smem_bytes = 0;
  const bool programmatic_launch = true;  // else the kernel waits before it reads
  HF_FASTPATH_CUDA_CHECK(launch_programmatic(kernel, grid, block, smem_bytes, stream, programmatic_launch, p,
                                             static_cast<int>(slices)));
}

}  // namespace

void launch_gated_delta_step(const GatedDeltaParams& p, cudaStream_t stream) {
  constexpr int kElems = kVecElems<float>;
  const bool whole = p.v_dim % kElems == 0 && is_aligned16(p.state);
  with_type(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    return whole ? launch<T, kElems>(p, stream) : launch<T, 1>(p, stream);
  });
}

}  // namespace hf_fastpath
