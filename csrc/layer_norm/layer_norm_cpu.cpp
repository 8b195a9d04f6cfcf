// layer_norm on the CPU: checks, allocation, threads, and the portable kernel.
#include "layer_norm/layer_norm_cpu.h"

#include "common/composed_ops.h"
#include "common/cpu_glue.h"
#include "common/cpu_math.h"

namespace hf_fastpath {

void layer_norm_portable(const LayerNormArgs& args, int64_t begin, int64_t end) {
  with_storage(args.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const T* weight = static_cast<const T*>(args.weight);
    const T* bias = static_cast<const T*>(args.bias);
    const int64_t n = args.hidden_size;
    for (int64_t row = begin; row < end; ++row) {
      const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
      T* out = static_cast<T*>(args.out) + row * n;
      double sum = 0, squares = 0;
      for (int64_t i = 0; i < n; ++i) sum += to_float(x[i]);
      const double exact_mean = sum / static_cast<double>(n);
      for (int64_t i = 0; i < n; ++i)
        squares += (to_float(x[i]) - exact_mean) * (to_float(x[i]) - exact_mean);
      const float mean = static_cast<float>(exact_mean);
      const float variance = static_cast<float>(squares / static_cast<double>(n));
      const float scale = 1.0f / std::sqrt(variance + static_cast<float>(args.eps));
      for (int64_t i = 0; i < n; ++i) {
        const float w = weight != nullptr ? to_float(weight[i]) : 1.0f;
        const float b = bias != nullptr ? to_float(bias[i]) : 0.0f;
        from_float((to_float(x[i]) - mean) * scale * w + b, out + i);
      }
      if (args.residual != nullptr) add_row(static_cast<const T*>(args.residual) + row * n, n, out);
    }
  });
}

Tensor layer_norm_cpu(const Tensor& x, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                      double eps, const std::optional<Tensor>& residual) {
  const char* op = "layer_norm";
  const DType dtype = dtype_of(x, op);
  STD_TORCH_CHECK(x.dim() >= 1, "hf_fastpath::layer_norm: x has no dimensions, expected [..., hidden_size]");
  const RowView rows = row_view(x);
  check_vector(weight, rows.columns, dtype, op, "weight");
  check_vector(bias, rows.columns, dtype, op, "bias");
  check_residual(x, residual, op);
  std::optional<Tensor> weight_holder, bias_holder, residual_holder;
  Tensor out = empty_like_with_sizes(x, sizes_of(x));
  const LayerNormArgs args{dtype,
                           rows.data,
                           rows.stride,
                           optional_data(weight, weight_holder),
                           optional_data(bias, bias_holder),
                           optional_data(residual, residual_holder),
                           out.mutable_data_ptr(),
                           rows.columns,
                           eps};
  const auto kernel = use_avx2() ? layer_norm_avx2 : layer_norm_portable;
  for_each_range(rows.rows, 2 * rows.rows * rows.columns * element_size(dtype),
                 [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
  return out;
}

HF_FASTPATH_KERNEL(CPU, "layer_norm", layer_norm_cpu)

}  // namespace hf_fastpath
