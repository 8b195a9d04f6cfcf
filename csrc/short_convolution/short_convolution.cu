// What: moves the last inputs of each channel by one, and computes activation(sum(weight * inputs) + bias),
//   with gates in front and behind, in float32, rounded once; the input's gate is rounded before.
// Work split: a thread takes a channel, of a prompt for 16 tokens. Windows of four are one access of 8 or 16
//   bytes; other widths go input by input.
// Traffic: channels * (3 * width + 2) * sizeof(T): 200 KB for 8192 channels of 4.
// Roofline: latency of one load and one store. Windows, weights and bias are brought into L2 while the
//   kernel in front still runs.

#include "common/activation.cuh"
#include "common/async.cuh"
#include "common/numeric.cuh"
#include "short_convolution/short_convolution.h"

namespace hf_fastpath {
namespace {

constexpr int kThreads = 128;
constexpr int kWindow = 4;  // the width that nearly all models have

// A window of four as one access.
template <class T>
struct Window {
  using Raw = std::conditional_t<sizeof(T) == 4, uint4, uint2>;
  static __device__ __forceinline__ void load(const T* from, float (&values)[kWindow]) {
    const Raw raw = __ldcg(reinterpret_cast<const Raw*>(from));
    const T* elements = reinterpret_cast<const T*>(&raw);
#pragma unroll
    for (int j = 0; j < kWindow; ++j) values[j] = to_float(elements[j]);
  }
  static __device__ __forceinline__ void store(T* to, const float (&values)[kWindow]) {
    Raw raw;
    T* elements = reinterpret_cast<T*>(&raw);
#pragma unroll
    for (int j = 0; j < kWindow; ++j) elements[j] = from_float<T>(values[j]);  // exact: they were T
    *reinterpret_cast<Raw*>(to) = raw;
  }
};

template <class T>
__device__ __forceinline__ float load_of_channel(const void* base, int64_t i) {
  return to_float(Chunk<T, 1>::load_l2(static_cast<const T*>(base) + i));
}

// Tokens that a thread computes.
constexpr int kTokensAtOnce = 16;
static_assert(kTokensAtOnce >= kMaxConvolutionWidth, "a window holds inputs of one thread in front at most");

// Takes all tokens of each sequence, where there are several: a block takes a few tokens of some channels,
// and reads the inputs in front of these once more. The block of the first tokens moves the state, which no
// other reads.
template <class T>
__global__ void __launch_bounds__(kThreads) short_convolution_tokens(ShortConvolutionParams p, int tiles) {
  allow_next_kernel();
  const int64_t sequence = blockIdx.x / tiles, begin = sequence * p.tokens;
  const int channel = blockIdx.x % tiles * kThreads + threadIdx.x;
  if (channel >= p.channels) return;
  const int width = static_cast<int>(p.width);
  const int64_t first = int64_t(blockIdx.y) * kTokensAtOnce;
  T* state = static_cast<T*>(p.state) + (sequence * p.channels + channel) * width;
  const T* weight = static_cast<const T*>(p.weight) + int64_t(channel) * width;
  wait_for_previous_kernel();
  const auto input = [&](int64_t token) {
    const float x = load_of_channel<T>(p.x, (begin + token) * p.x_stride + channel);
    if (!p.input_gate) return x;
    const float gate = load_of_channel<T>(p.input_gate, (begin + token) * p.input_gate_stride + channel);
    return to_float(from_float<T>(gate * x));
  };
  const float bias = p.bias ? load_of_channel<T>(p.bias, channel) : 0.f;
  float inputs[kMaxConvolutionWidth], factors[kMaxConvolutionWidth], x[kTokensAtOnce];
#pragma unroll
  for (int t = 0; t < kTokensAtOnce; ++t) x[t] = first + t < p.tokens ? input(first + t) : 0.f;
  // The newest input is the last of a window of any width.
#pragma unroll
  for (int j = 0; j < kMaxConvolutionWidth; ++j) {
    const int place = j - (static_cast<int>(kMaxConvolutionWidth) - width);
    inputs[j] = place < 0    ? 0.f
                : first == 0 ? load_of_channel<T>(state, place)
                             : input(first - kMaxConvolutionWidth + j);
    factors[j] = place >= 0 ? load_of_channel<T>(weight, place) : 0.f;
  }
  if (first == 0) {
#pragma unroll
    for (int j = 0; j < kMaxConvolutionWidth; ++j) {
      const int place = j - (static_cast<int>(kMaxConvolutionWidth) - width);
      if (place < 0) continue;
      const int64_t token = p.tokens - width + place;  // its input goes to this place
      state[place] = from_float<T>(token >= 0 ? input(token) : load_of_channel<T>(state, place + p.tokens));
    }
  }
#pragma unroll
  for (int t = 0; t < kTokensAtOnce; ++t) {
    if (first + t >= p.tokens) break;
    const int64_t row = begin + first + t;
    float sum = bias;
#pragma unroll
    for (int j = 0; j < kMaxConvolutionWidth; ++j) {
      inputs[j] = j + 1 < kMaxConvolutionWidth ? inputs[j + 1] : x[t];
      sum = fmaf(factors[j], inputs[j], sum);
    }
    sum = activate(sum, p.activation);
    if (p.output_gate) sum *= load_of_channel<T>(p.output_gate, row * p.output_gate_stride + channel);
    static_cast<T*>(p.out)[row * p.channels + channel] = from_float<T>(sum);
  }
}

// kWhole: windows and weights are accesses of four.
template <class T, bool kWhole>
__global__ void __launch_bounds__(kThreads) short_convolution_kernel(ShortConvolutionParams p, int tiles) {
  allow_next_kernel();
  const int64_t row = blockIdx.x / tiles;
  const int channel = blockIdx.x % tiles * kThreads + threadIdx.x;
  if (channel >= p.channels) return;
  const int width = static_cast<int>(p.width);
  T* state = static_cast<T*>(p.state) + (row * p.channels + channel) * width;
  const T* weight = static_cast<const T*>(p.weight) + int64_t(channel) * width;
  prefetch_l2(state);
  prefetch_l2(weight);
  if (p.bias) prefetch_l2(static_cast<const T*>(p.bias) + channel);
  wait_for_previous_kernel();

  float x = load_of_channel<T>(p.x, row * p.x_stride + channel);
  if (p.input_gate) {
    const float gate = load_of_channel<T>(p.input_gate, row * p.input_gate_stride + channel);
    x = to_float(from_float<T>(gate * x));
  }
  float sum = p.bias ? load_of_channel<T>(p.bias, channel) : 0.f;
  if constexpr (kWhole) {
    float inputs[kWindow], factors[kWindow];
    Window<T>::load(state, inputs);
    Window<T>::load(weight, factors);
#pragma unroll
    for (int j = 0; j < kWindow; ++j) inputs[j] = j + 1 < kWindow ? inputs[j + 1] : x;
    Window<T>::store(state, inputs);
#pragma unroll
    for (int j = 0; j < kWindow; ++j) sum = fmaf(factors[j], inputs[j], sum);
  } else {
    for (int j = 0; j < width; ++j) {
      const float input = j + 1 < width ? load_of_channel<T>(state, j + 1) : x;
      state[j] = from_float<T>(input);
      sum = fmaf(load_of_channel<T>(weight, j), input, sum);
    }
  }
  sum = activate(sum, p.activation);
  if (p.output_gate) sum *= load_of_channel<T>(p.output_gate, row * p.output_gate_stride + channel);
  static_cast<T*>(p.out)[row * p.channels + channel] = from_float<T>(sum);
}

}  // namespace

void launch_short_convolution(const ShortConvolutionParams& p, cudaStream_t stream) {
  const int64_t tiles = (p.channels + kThreads - 1) / kThreads;
  const dim3 grid(static_cast<unsigned>(p.batch * tiles)), block(kThreads);
  const size_t smem_bytes = 0;
  const bool programmatic_launch = true;  // nothing is read before the wait
  with_type(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto is_whole = [](const void* data) {
      return reinterpret_cast<uintptr_t>(data) % (kWindow * sizeof(T)) == 0;
    };
    if (p.tokens > 1) {
      const int64_t segments = (p.tokens + kTokensAtOnce - 1) / kTokensAtOnce;
      const dim3 of_tokens(grid.x, static_cast<unsigned>(segments));
      HF_FASTPATH_CUDA_CHECK(launch_programmatic(short_convolution_tokens<T>, of_tokens, block, smem_bytes,
                                                 stream, programmatic_launch, p, static_cast<int>(tiles)));
      return;
    }
    const bool whole = p.width == kWindow && is_whole(p.state) && is_whole(p.weight);
    const auto kernel = whole ? short_convolution_kernel<T, true> : short_convolution_kernel<T, false>;
    HF_FASTPATH_CUDA_CHECK(launch_programmatic(kernel, grid, block, smem_bytes, stream, programmatic_launch,
                                               p, static_cast<int>(tiles)));
  });
}

}  // namespace hf_fastpath
