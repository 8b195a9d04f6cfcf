// lora_down on the CPU: rows of a matrix as outputs of one head of head_products, behind gemv's norm.
#include "common/composed_ops.h"
#include "common/convert_cpu.h"
#include "common/cpu_glue.h"
#include "head_products/head_products_cpu.h"
#include "lora_down/lora_down_glue.h"

namespace hf_fastpath {

Tensor lora_down_cpu(const Tensor& raw, const std::vector<Tensor>& weights, int64_t norm,
                     const std::optional<Tensor>& norm_weight, const std::optional<Tensor>& norm_bias,
                     double norm_eps, bool programmatic_launch, const std::optional<Tensor>& chosen,
                     const std::vector<int64_t>& owners) {
  const Tensor x = normed_cpu(raw, norm_of(norm, LoraDownCall::kOp), norm_weight, norm_bias, norm_eps);
  const LoraDownCall call(x, weights, programmatic_launch, chosen, owners);
  const LoraDownParams& p = call.params;
  const LoraMatrices& matrices = p.matrices;
  const int64_t inputs = p.inputs, ranks = matrices.ranks;
  const auto convert = use_avx2() ? convert_to_float_avx2 : convert_to_float_portable;
  const auto kernel = use_avx2() ? head_product_avx2 : head_product_portable;
  float* const values = scratch(p.rows * inputs);  // all threads read them
  convert(p.dtype, p.x, values, p.rows * inputs);
  for_each_range(ranks, ranks * inputs * element_size(matrices.dtype), [&](int64_t begin, int64_t end) {
    for (int m = 0; m < matrices.count; ++m) {
      const int64_t first = matrices.first_rank[m];
      HeadProductsParams head = {};
      head.dtype = matrices.dtype, head.weight_row_stride = matrices.each[m].row_stride;
      head.inputs = inputs, head.outputs = matrices.each[m].rows;
      const int64_t stop = std::min(end - first, head.outputs);
      // Rank by rank, so that a row of the matrix comes from memory once for all rows of x.
      for (int64_t rank = std::max<int64_t>(begin - first, 0); rank < stop; ++rank)
        for (int64_t row = 0; row < p.rows; ++row) {
          float* const out = p.out + row * ranks + first;
          if (is_left_out(p, row, m)) {
            out[rank] = 0.f;
          } else {
            kernel(head, matrices.each[m].data, values + row * inputs, rank, rank + 1, out);
          }
        }
    }
  });
  return call.out;
}

HF_FASTPATH_KERNEL(CPU, "lora_down", lora_down_cpu)

}  // namespace hf_fastpath
