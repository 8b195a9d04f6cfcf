// What: for each channel t = softplus(dt + dt_bias), S = exp(-t exp(a_log)) S + t x b and
//   (S . c + d x) silu(z), all in float32; the result is rounded once.
// Work split: kLanes lanes of a warp take a channel, each an access of 16 bytes of its state where these are
//   whole, and a warp takes kChannels such sets of channels: all of a step's state is on its way at once.
//   Every lane computes the values that its channel has one of.
// Traffic: the state once in each direction; for Mamba-1 a_log, too.
// Roofline: memory bandwidth. State and parameters are brought into L2 while the kernel in front still runs.

#include "common/activation.cuh"
#include "common/async.cuh"
#include "common/heads.cuh"
#include "common/warp.cuh"
#include "selective_state_step/selective_state_step.h"

namespace hf_fastpath {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpSize;

// Channels that a lane has a part of. Those of few lanes are Mamba-1's, whose exponentials take longer than
// its loads: more warps.
template <int kLanes>
constexpr int kChannelsOfLane = kLanes == kWarpSize ? 4 : 1;

template <class T, int kElems, int kLanes, bool kPerChannel>
__global__ void __launch_bounds__(kThreads) selective_state_kernel(SelectiveStateParams p, int tiles) {
  using S = Chunk<float, kElems>;
  constexpr int kChannels = kChannelsOfLane<kLanes>, kAtOnce = kWarpSize / kLanes;
  constexpr int kParameters = kPerChannel ? kChannels : 1;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int heads = static_cast<int>(p.heads), head_dim = static_cast<int>(p.head_dim);
  const int state_size = static_cast<int>(p.state_size);
  const int head_of_all = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  const int64_t row = head_of_all / heads;
  const int head = head_of_all % heads, group = head / static_cast<int>(p.heads / p.groups);
  const int first = (tile * kWarps + warp) * kChannels * kAtOnce + lane / kLanes;
  const int place = lane % kLanes * kElems;
  float* states = p.state + int64_t(head_of_all) * head_dim * state_size;
  const auto channel_of = [&](int i) { return first + i * kAtOnce; };
  const auto bounded = [&](int i) { return min(channel_of(i), head_dim - 1); };
  const auto parameter_of = [&](int i) {
    return kPerChannel ? int64_t(head) * head_dim + bounded(i) : int64_t(head);
  };

  allow_next_kernel();
#pragma unroll
  for (int i = 0; i < kChannels; ++i) {
    if (channel_of(i) >= head_dim) continue;
    for (int n = place; n < state_size; n += kLanes * kElems) {
      prefetch_l2(states + int64_t(channel_of(i)) * state_size + n);
      if constexpr (kPerChannel) prefetch_l2(p.a_log, parameter_of(i) * state_size + n);
    }
  }
#pragma unroll
  for (int i = 0; i < kParameters; ++i) {
    if constexpr (!kPerChannel) prefetch_l2(p.a_log, head);
    prefetch_l2(p.dt_bias, parameter_of(i));
    prefetch_l2(p.d, parameter_of(i));
  }
  wait_for_previous_kernel();

  // All loads come first, then the arithmetic. Lanes without a channel take the last one, and store nothing.
  const T* b = head_of<T>(p.b, row, group);
  const T* c = head_of<T>(p.c, row, group);
  typename S::Raw raw[kChannels];
  float b_here[kElems], c_here[kElems], rates[kParameters][kElems];
  const auto load_part = [&](int n) {
    if (n >= state_size) return;
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      raw[i] = S::load_l2(states + int64_t(bounded(i)) * state_size + n);
      if constexpr (kPerChannel) {
#pragma unroll
        for (int e = 0; e < kElems; ++e)
          rates[i][e] = load_float_l2(p.a_log, parameter_of(i) * state_size + n + e);
      }
    }
#pragma unroll
    for (int e = 0; e < kElems; ++e)
      b_here[e] = load_float_l2(b + n + e), c_here[e] = load_float_l2(c + n + e);
  };
  load_part(place);
  float step[kParameters], skip[kParameters], x[kChannels], gate[kChannels], decay = 0.f;
#pragma unroll
  for (int i = 0; i < kParameters; ++i) {
    step[i] = load_float_l2(head_of<T>(p.dt, row, head) + (kPerChannel ? bounded(i) : 0));
    if (p.dt_bias.data) step[i] += load_float_l2(p.dt_bias, parameter_of(i));
    skip[i] = p.d.data ? load_float_l2(p.d, parameter_of(i)) : 0.f;
  }
  if constexpr (!kPerChannel) decay = load_float_l2(p.a_log, head);
#pragma unroll
  for (int i = 0; i < kChannels; ++i) {
    x[i] = load_float_l2(head_of<T>(p.x, row, head) + bounded(i));
    gate[i] = p.z.data ? load_float_l2(head_of<T>(p.z, row, head) + bounded(i)) : 0.f;
  }
#pragma unroll
  for (int i = 0; i < kParameters; ++i) step[i] = softplus(step[i]);
  if constexpr (!kPerChannel) decay = expf(-step[0] * expf(decay));

  float sum[kChannels] = {};
  for (int n = place; n < state_size; n += kLanes * kElems) {
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      const int own = kPerChannel ? i : 0;
      float values[kElems];
      S::unpack(raw[i], values);
#pragma unroll
      for (int e = 0; e < kElems; ++e) {
        const float factor = kPerChannel ? expf(-step[own] * expf(rates[own][e])) : decay;
        values[e] = fmaf(factor, values[e], step[own] * x[i] * b_here[e]);
        sum[i] = fmaf(values[e], c_here[e], sum[i]);
      }
      if (channel_of(i) < head_dim) S::store(states + int64_t(channel_of(i)) * state_size + n, values);
    }
    load_part(n + kLanes * kElems);
  }
#pragma unroll
  for (int i = 0; i < kChannels; ++i) {
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2)
      sum[i] += __shfl_xor_sync(kAllLanes, sum[i], offset);
    float y = p.d.data ? fmaf(skip[kPerChannel ? i : 0], x[i], sum[i]) : sum[i];
    if (p.z.data) y *= silu<true>(gate[i]);
    if (place == 0 && channel_of(i) < head_dim)
      static_cast<T*>(p.out)[int64_t(head_of_all) * head_dim + channel_of(i)] = from_float<T>(y);
  }
}

template <class T, int kElems, int kLanes>
void launch_lanes(const SelectiveStateParams& p, cudaStream_t stream) {
  constexpr int kOfBlock = kWarps * kChannelsOfLane<kLanes> * kWarpSize / kLanes;
  const int64_t tiles = (p.head_dim + kOfBlock - 1) / kOfBlock;
  const dim3 grid(static_cast<unsigned>(p.batch * p.heads * tiles)), block(kThreads);
  const size_t smem_bytes = 0;
  const bool programmatic_launch = true;  // nothing is read before the wait
  const auto kernel = p.per_channel ? selective_state_kernel<T, kElems, kLanes, true>
                                    : selective_state_kernel<T, kElems, kLanes, false>;
  HF_FASTPATH_CUDA_CHECK(launch_programmatic(kernel, grid, block, smem_bytes, stream, programmatic_launch, p,
                                             static_cast<int>(tiles)));
}

}  // namespace

void launch_selective_state_step(const SelectiveStateParams& p, cudaStream_t stream) {
  constexpr int kElems = kVecElems<float>;
  const bool whole = p.state_size % kElems == 0 && is_aligned16(p.state);
  constexpr int kFew = 4;  // lanes: states of 16, Mamba-1's
  with_type(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (!whole) return launch_lanes<T, 1, kWarpSize>(p, stream);
    if (p.state_size <= kFew * kElems) return launch_lanes<T, kElems, kFew>(p, stream);
    return launch_lanes<T, kElems, kWarpSize>(p, stream);
  });
}

}  // namespace hf_fastpath
