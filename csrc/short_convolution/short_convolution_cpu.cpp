// short_convolution on the CPU: threads, and the portable kernel.
#include "short_convolution/short_convolution_cpu.h"

#include <type_traits>

#include "common/cpu_glue.h"
#include "common/cpu_math.h"
#include "short_convolution/short_convolution_glue.h"

namespace hf_fastpath {

void short_convolution_portable(const ShortConvolutionParams& p, int64_t begin, int64_t end) {
  with_storage(p.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t channel = i % p.channels, first_row = i / p.channels * p.tokens;
      T* state = static_cast<T*>(p.state) + i * p.width;
      const T* weight = static_cast<const T*>(p.weight) + channel * p.width;
      for (int64_t row = first_row; row < first_row + p.tokens; ++row) {
        for (int64_t j = 0; j + 1 < p.width; ++j) state[j] = state[j + 1];
        T* newest = state + p.width - 1;
        *newest = static_cast<const T*>(p.x)[row * p.x_stride + channel];
        if (p.input_gate != nullptr) {
          const T gate = static_cast<const T*>(p.input_gate)[row * p.input_gate_stride + channel];
          from_float(to_float(gate) * to_float(*newest), newest);
        }
        float sum = p.bias != nullptr ? to_float(static_cast<const T*>(p.bias)[channel]) : 0.0f;
        for (int64_t j = 0; j < p.width; ++j) sum += to_float(weight[j]) * to_float(state[j]);
        sum = activate(p.activation, sum);
        if (p.output_gate != nullptr)
          sum *= to_float(static_cast<const T*>(p.output_gate)[row * p.output_gate_stride + channel]);
        from_float(sum, static_cast<T*>(p.out) + row * p.channels + channel);
      }
    }
  });
}

Tensor short_convolution_cpu(const Tensor& x, const Tensor& conv_state, const Tensor& weight,
                             const std::optional<Tensor>& bias, int64_t activation,
                             const std::optional<Tensor>& input_gate,
                             const std::optional<Tensor>& output_gate, int64_t tokens) {
  const ShortConvolutionCall call(x, conv_state, weight, bias, activation, input_gate, output_gate, tokens);
  const ShortConvolutionParams& p = call.params;
  const auto kernel = use_avx2() ? short_convolution_avx2 : short_convolution_portable;
  const int64_t channels = p.batch * p.channels;
  for_each_range(channels, 3 * channels * p.tokens * p.width * element_size(p.dtype),
                 [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
  return call.out;
}

HF_FASTPATH_KERNEL(CPU, "short_convolution", short_convolution_cpu)

}  // namespace hf_fastpath
