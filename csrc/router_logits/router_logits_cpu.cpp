// router_logits on the CPU: one head of head_products, whose sums are kept in float32.
#include <type_traits>

#include "common/convert_cpu.h"
#include "common/cpu_glue.h"
#include "head_products/head_products_cpu.h"
#include "router_logits/router_logits_glue.h"

namespace hf_fastpath {

Tensor router_logits_cpu(const Tensor& x, const Tensor& weight, bool programmatic_launch) {
  const RouterLogitsCall call(x, weight, programmatic_launch);
  const RouterLogitsParams& p = call.params;
  if (call.out.numel() == 0) return call.out;
  HeadProductsParams head = {};
  head.dtype = p.weight_dtype, head.weight_row_stride = p.weight_row_stride;
  head.inputs = p.inputs, head.outputs = p.outputs;
  const auto convert = use_avx2() ? convert_to_float_avx2 : convert_to_float_portable;
  const auto kernel = use_avx2() ? head_product_avx2 : head_product_portable;
  const int64_t row_bytes = p.inputs * element_size(p.dtype);
  const int64_t weight_bytes = p.outputs * p.inputs * element_size(p.weight_dtype);
  for_each_range(p.outputs, weight_bytes, [&](int64_t begin, int64_t end) {
    float* values = scratch(p.inputs);
    for (int64_t row = 0; row < p.rows; ++row) {
      convert(p.dtype, static_cast<const char*>(p.x) + row * row_bytes, values, p.inputs);
      kernel(head, p.weight, values, begin, end, p.out + row * p.outputs);
    }
  });
  return call.out;
}

HF_FASTPATH_KERNEL(CPU, "router_logits", router_logits_cpu)

}  // namespace hf_fastpath
