// gated_rms_norm on the CPU: threads, and the portable kernel.
#include "gated_rms_norm/gated_rms_norm_cpu.h"

#include <type_traits>

#include "common/cpu_glue.h"
#include "common/cpu_math.h"
#include "gated_rms_norm/gated_rms_norm_glue.h"

namespace hf_fastpath {

void gated_rms_norm_portable(const GatedRmsNormParams& p, int64_t begin, int64_t end, float* products) {
  with_storage(p.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const int64_t n = p.hidden_size / p.groups;
    for (int64_t group = begin; group < end; ++group) {
      const int64_t row = group / p.groups, first = group % p.groups * n;
      const T* x = static_cast<const T*>(p.x) + row * p.x_stride + first;
      const T* gate = static_cast<const T*>(p.gate) + row * p.gate_stride + first;
      const T* weight = static_cast<const T*>(p.weight) + first;
      T* out = static_cast<T*>(p.out) + row * p.hidden_size + first;
      double total = 0;
      for (int64_t i = 0; i < n; ++i) {
        const float value = to_float(x[i]), z = to_float(gate[i]);
        products[i] =
            value * (p.activation == GateActivation::kSilu ? silu(z) : 1.0f / (1.0f + std::exp(-z)));
        const float normed = p.gate_first ? products[i] : value;
        total += double(normed) * normed;
      }
      const float scale = 1.0f / std::sqrt(static_cast<float>(total / static_cast<double>(n)) + p.eps);
      for (int64_t i = 0; i < n; ++i) from_float(products[i] * scale * to_float(weight[i]), out + i);
    }
  });
}

Tensor gated_rms_norm_cpu(const Tensor& x, const Tensor& gate, const Tensor& weight, double eps,
                          int64_t groups, bool gate_first, int64_t activation, bool programmatic_launch) {
  const GatedRmsNormCall call(x, gate, weight, eps, groups, gate_first, activation, programmatic_launch);
  const GatedRmsNormParams& p = call.params;
  const auto kernel = use_avx2() ? gated_rms_norm_avx2 : gated_rms_norm_portable;
  for_each_range(
      p.rows * p.groups, 3 * p.rows * p.hidden_size * element_size(p.dtype),
      [&](int64_t begin, int64_t end) { kernel(p, begin, end, scratch(p.hidden_size / p.groups)); });
  return call.out;
}

HF_FASTPATH_KERNEL(CPU, "gated_rms_norm", gated_rms_norm_cpu)

}  // namespace hf_fastpath
