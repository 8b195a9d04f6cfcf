// lora_up on the CPU: threads, and the portable kernel.
#include "lora_up/lora_up_cpu.h"

#include <type_traits>

#include "common/cpu_glue.h"
#include "common/cpu_math.h"
#include "lora_up/lora_up_glue.h"

namespace hf_fastpath {
namespace {

// base of one feature and row, and what all matrices add to it.
template <class T, class W>
float sum_of(const LoraUpParams& p, int64_t row, int64_t feature) {
  const LoraMatrices& matrices = p.matrices;
  float sum = to_float(static_cast<const T*>(p.base)[row * p.features + feature]);
  for (int m = 0; m < matrices.count; ++m) {
    const LoraMatrix& matrix = matrices.each[m];
    const int64_t at = feature - p.first_feature[m];
    if (at < 0 || at >= matrix.rows || is_left_out(p, row, m)) continue;
    const W* weight = static_cast<const W*>(matrix.data) + at * matrix.row_stride;
    const float* hidden = p.hidden + row * matrices.ranks + matrices.first_rank[m];
    double product = 0.0;
    for (int i = 0; i < matrix.columns; ++i) product += double(hidden[i]) * to_float(weight[i]);
    sum += p.scale[m] * static_cast<float>(product);
  }
  return sum;
}

template <class T, class W>
void run(const LoraUpParams& p, int64_t begin, int64_t end) {
  for (int64_t row = 0; row < p.rows; ++row) {
    for (int64_t o = begin; o < end; ++o) {
      float value = activate(p.activation, sum_of<T, W>(p, row, o));
      if (p.gated) value *= sum_of<T, W>(p, row, p.outputs + o);
      const int64_t at = row * p.outputs + o;
      if (p.residual != nullptr) value += to_float(static_cast<const T*>(p.residual)[at]);
      from_float(value, static_cast<T*>(p.out) + at);
    }
  }
}

}  // namespace

void lora_up_portable(const LoraUpParams& p, int64_t begin, int64_t end) {
  with_storage(p.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    p.matrices.dtype == p.dtype ? run<T, T>(p, begin, end) : run<T, float>(p, begin, end);
  });
}

Tensor lora_up_cpu(const Tensor& base, const Tensor& hidden, const std::vector<Tensor>& weights,
                   const std::vector<double>& scales, const std::vector<int64_t>& firsts,
                   const std::optional<Tensor>& residual, int64_t activation, bool gated,
                   bool programmatic_launch, const std::optional<Tensor>& chosen,
                   const std::vector<int64_t>& owners) {
  const LoraUpCall call(base, hidden, weights, scales, firsts, residual, activation, gated,
                        programmatic_launch, chosen, owners);
  const LoraUpParams& p = call.params;
  int64_t bytes = 2 * p.rows * p.features * element_size(p.dtype);
  for (int m = 0; m < p.matrices.count; ++m)
    bytes += int64_t(p.matrices.each[m].rows) * p.matrices.each[m].columns * element_size(p.matrices.dtype);
  const auto kernel = use_avx2() ? lora_up_avx2 : lora_up_portable;
  for_each_range(p.outputs, bytes, [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
  return call.out;
}

HF_FASTPATH_KERNEL(CPU, "lora_up", lora_up_cpu)

}  // namespace hf_fastpath
