// head_products on the CPU: threads, and the portable kernel.
#include "head_products/head_products_cpu.h"

#include <type_traits>

#include "common/convert_cpu.h"
#include "common/cpu_glue.h"
#include "common/heads_cpu.h"
#include "head_products/head_products_glue.h"

namespace hf_fastpath {

void head_product_portable(const HeadProductsParams& p, const void* weight, const float* x, int64_t begin,
                           int64_t end, float* sums) {
  with_storage(p.dtype, [&](auto* tag) {
    const auto* values = static_cast<const std::remove_pointer_t<decltype(tag)>*>(weight);
    const int64_t of_output = p.transposed ? 1 : p.weight_row_stride;
    const int64_t of_input = p.transposed ? p.weight_row_stride : 1;
    for (int64_t o = begin; o < end; ++o) {
      double sum = 0.0;
      for (int64_t i = 0; i < p.inputs; ++i)
        sum += double(x[i]) * to_float(values[o * of_output + i * of_input]);
      sums[o] = static_cast<float>(sum);
    }
  });
}

namespace {

// Outputs [begin, end) of the heads in a row, for all rows: a weight is read from memory once.
template <class T>
void run_outputs(const HeadProductsParams& p, int64_t begin, int64_t end) {
  const bool avx2 = use_avx2();
  const auto convert = avx2 ? convert_to_float_avx2 : convert_to_float_portable;
  const auto kernel = avx2 ? head_product_avx2 : head_product_portable;
  float* x = scratch<0>(p.inputs);
  float* sums = scratch<1>(p.outputs);
  for (int64_t at_output = begin; at_output < end;) {
    const int64_t head = at_output / p.outputs, first = at_output % p.outputs;
    const int64_t last = std::min(p.outputs, first + end - at_output);
    const T* weight = static_cast<const T*>(p.weight) + head * p.weight_head_stride;
    for (int64_t row = 0; row < p.batch; ++row) {
      convert(p.dtype, head_of<T>(p.x, row, head), x, p.inputs);
      kernel(p, weight, x, first, last, sums);
      T* out = static_cast<T*>(p.out) + (row * p.heads + head) * p.outputs;
      for (int64_t o = first; o < last; ++o) from_float(sums[o], out + o);
    }
    at_output += last - first;
  }
}

}  // namespace

Tensor head_products_cpu(const Tensor& x, const Tensor& weight, bool transposed, bool programmatic_launch) {
  const HeadProductsCall call(x, weight, transposed, programmatic_launch);
  const HeadProductsParams& p = call.params;
  if (call.out.numel() == 0) return call.out;
  const int64_t outputs = p.heads * p.outputs;
  for_each_range(outputs, outputs * p.inputs * element_size(p.dtype), [&](int64_t begin, int64_t end) {
    with_storage(p.dtype,
                 [&](auto* tag) { run_outputs<std::remove_pointer_t<decltype(tag)>>(p, begin, end); });
  });
  return call.out;
}

HF_FASTPATH_KERNEL(CPU, "head_products", head_products_cpu)

}  // namespace hf_fastpath
