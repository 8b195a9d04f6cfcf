// What: gates, norms of q and k, and for each head S = g S + k (beta (v - k^T g S))^T with the result q^T S,
//   all in float32; the result is rounded once.
// Work split: a block takes a slice of a head's columns, 32 of them where accesses are whole, and keeps it in
//   registers: a row of a slice is a line of memory, which eight threads read. Sums over rows go through
//   shuffles and one exchange in shared memory: q^T S follows from q^T g S, which is summed together with
//   k^T g S, and q.k. Every warp computes gates and norms for itself, which costs no barrier.
// Traffic: the state once in each direction, 2 * 4 * k_dim * v_dim bytes a head; all else is a few KB.
// Roofline: memory bandwidth: all of a state of 32 heads of 128 x 128 is on its way at once, in one wave of
//   blocks. The state is brought into L2 while the kernel in front still runs.

#include "common/async.cuh"
#include "common/heads.cuh"
#include "common/warp.cuh"
#include "gated_delta_step/gated_delta_step.h"

namespace hf_fastpath {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kAcross = 8;                       // threads along a row of a slice
constexpr int kRowsAtOnce = kThreads / kAcross;  // of the state
static_assert(kRowsAtOnce == kWarpSize, "a lane keeps an element of q and k for each access");

// kRows: rows of the state that a thread keeps. Lane l of each warp holds elements l + 32 i of q and k.
template <class T, int kElems, int kRows>
__global__ void __launch_bounds__(kThreads) gated_delta_kernel(GatedDeltaParams p, int slices) {
  using S = Chunk<float, kElems>;
  constexpr int kColumns = kAcross * kElems;
  __shared__ __align__(16) float known_of[kWarps][kColumns], read_of[kWarps][kColumns];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int k_dim = static_cast<int>(p.k_dim), v_dim = static_cast<int>(p.v_dim);
  const int heads = static_cast<int>(p.v_heads);
  const int head_of_all = blockIdx.x / slices, slice = blockIdx.x % slices;
  const int64_t row = head_of_all / heads;
  const int head = head_of_all % heads, k_head = head / static_cast<int>(p.v_heads / p.k_heads);
  const int place = threadIdx.x % kAcross * kElems, column = slice * kColumns + place;
  const int first_row = threadIdx.x / kAcross;
  float* state = p.state + int64_t(head_of_all) * k_dim * v_dim + column;
  const auto is_mine = [&](int r) { return r < k_dim && column < v_dim; };

  allow_next_kernel();
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int r = first_row + i * kRowsAtOnce;
    if (place == 0 && is_mine(r)) prefetch_l2(state + int64_t(r) * v_dim);
  }
  wait_for_previous_kernel();

  typename S::Raw raw[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int r = first_row + i * kRowsAtOnce;
    raw[i] = is_mine(r) ? S::load_l2(state + int64_t(r) * v_dim) : S::zero();
  }
  const T* q_row = head_of<T>(p.q, row, k_head);
  const T* k_row = head_of<T>(p.k, row, k_head);
  const T* v_row = head_of<T>(p.v, row, head) + min(column, v_dim - kElems);
  const T* a_row = head_of<T>(p.a, row, head);
  float q[kRows], k[kRows], decay[kRows], v[kElems];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int r = lane + i * kRowsAtOnce, bounded = min(r, k_dim - 1);
    const float q_here = load_float_l2(q_row + bounded), k_here = load_float_l2(k_row + bounded);
    q[i] = r < k_dim ? q_here : 0.f;
    k[i] = r < k_dim ? k_here : 0.f;
    if (p.per_element)
      decay[i] = load_float_l2(a_row + bounded) + load_float_l2(p.dt_bias, int64_t(head) * k_dim + bounded);
  }
#pragma unroll
  for (int e = 0; e < kElems; ++e) v[e] = load_float_l2(v_row + e);
  const float rate = expf(load_float_l2(p.a_log, head));
  const float beta = p.beta_scale / (1.f + expf(-load_float_l2(head_of<T>(p.b, row, head))));
  if (p.per_element) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) decay[i] = expf(-rate * softplus(decay[i]));
  } else {
    const float of_all = expf(-rate * softplus(load_float_l2(a_row) + load_float_l2(p.dt_bias, head)));
#pragma unroll
    for (int i = 0; i < kRows; ++i) decay[i] = of_all;
  }

  float q_squares = 0.f, k_squares = 0.f, overlap = 0.f;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    q_squares = fmaf(q[i], q[i], q_squares);
    k_squares = fmaf(k[i], k[i], k_squares);
    overlap = fmaf(q[i], k[i], overlap);
  }
  overlap = warp_sum(overlap);
  float q_factor = p.scale, k_factor = 1.f;
  if (p.l2_norm) {
    q_factor /= sqrtf(warp_sum(q_squares) + kL2Eps);
    k_factor /= sqrtf(warp_sum(k_squares) + kL2Eps);
  }
  overlap *= q_factor * k_factor;

  float values[kRows][kElems], known[kElems] = {}, read[kElems] = {};
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int holder = first_row;  // the lane that has this row's elements
    const float of_row = __shfl_sync(kAllLanes, decay[i], holder);
    const float q_here = __shfl_sync(kAllLanes, q[i], holder) * q_factor;
    k[i] = __shfl_sync(kAllLanes, k[i], holder) * k_factor;
    S::unpack(raw[i], values[i]);
#pragma unroll
    for (int e = 0; e < kElems; ++e) {
      values[i][e] *= of_row;
      known[e] = fmaf(k[i], values[i][e], known[e]);
      read[e] = fmaf(q_here, values[i][e], read[e]);
    }
  }
#pragma unroll
  for (int offset = kAcross; offset < kWarpSize; offset *= 2) {
#pragma unroll
    for (int e = 0; e < kElems; ++e) {
      known[e] += __shfl_xor_sync(kAllLanes, known[e], offset);
      read[e] += __shfl_xor_sync(kAllLanes, read[e], offset);
    }
  }
  if (lane < kAcross) {
    S::store(&known_of[warp][place], known);
    S::store(&read_of[warp][place], read);
  }
  __syncthreads();  // every warp's sums are written
  float delta[kElems] = {};
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    float more[kElems];
    S::unpack(S::load(&known_of[w][place]), more);
#pragma unroll
    for (int e = 0; e < kElems; ++e) delta[e] += more[e];
  }
#pragma unroll
  for (int e = 0; e < kElems; ++e) delta[e] = beta * (v[e] - delta[e]);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int r = first_row + i * kRowsAtOnce;
    if (!is_mine(r)) continue;
#pragma unroll
    for (int e = 0; e < kElems; ++e) values[i][e] = fmaf(k[i], delta[e], values[i][e]);
    S::store(state + int64_t(r) * v_dim, values[i]);
  }
  if (threadIdx.x >= kAcross || column >= v_dim) return;
  float result[kElems] = {};
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    float more[kElems];
    S::unpack(S::load(&read_of[w][place]), more);
#pragma unroll
    for (int e = 0; e < kElems; ++e) result[e] += more[e];
  }
  T* out = static_cast<T*>(p.out) + int64_t(head_of_all) * v_dim + column;
#pragma unroll
  for (int e = 0; e < kElems; ++e) out[e] = from_float<T>(fmaf(overlap, delta[e], result[e]));
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
  const bool programmatic_launch = true;  // nothing is read before the wait
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
