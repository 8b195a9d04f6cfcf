// rms_norm on the CPU: checks, allocation, threads, and the portable kernel.
#include "rms_norm/rms_norm_cpu.h"

#include "common/composed_ops.h"
#include "common/cpu_glue.h"
#include "common/cpu_math.h"

namespace hf_fastpath {

void rms_norm_portable(const RmsNormArgs& args, int64_t begin, int64_t end) {
  with_storage(args.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const T* weight = static_cast<const T*>(args.weight);
    const int64_t n = args.hidden_size;
    for (int64_t row = begin; row < end; ++row) {
      const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
      T* out = static_cast<T*>(args.out) + row * n;
      double total = 0;
      for (int64_t i = 0; i < n; ++i) total += double(to_float(x[i])) * to_float(x[i]);
      const float mean = static_cast<float>(total / static_cast<double>(n));
      const float scale = 1.0f / std::sqrt(mean + static_cast<float>(args.eps));
      for (int64_t i = 0; i < n; ++i) {
        const float factor = weight == nullptr ? 1.0f : to_float(weight[i]) + args.weight_offset;
        from_float(to_float(x[i]) * scale * factor, out + i);
      }
      if (args.residual != nullptr) add_row(static_cast<const T*>(args.residual) + row * n, n, out);
      if (args.factor != nullptr) {
        const float factor = to_float(*static_cast<const T*>(args.factor));
        for (int64_t i = 0; i < n; ++i) from_float(to_float(out[i]) * factor, out + i);
      }
    }
  });
}

Tensor rms_norm_cpu(const Tensor& x, const std::optional<Tensor>& weight, double eps,
                    const std::optional<Tensor>& residual, double weight_offset, bool /*programmatic_launch*/,
                    const std::optional<Tensor>& factor) {
  const char* op = "rms_norm";
  const DType dtype = dtype_of(x, op);
  STD_TORCH_CHECK(x.dim() >= 1, "hf_fastpath::rms_norm: x has no dimensions, expected [..., hidden_size]");
  const RowView rows = row_view(x);
  check_vector(weight, rows.columns, dtype, op, "weight");
  check_residual(x, residual, op);
  check_factor(x, factor, op);
  std::optional<Tensor> weight_holder, residual_holder;
  Tensor out = empty_like_with_sizes(x, sizes_of(x));
  const RmsNormArgs args{dtype,
                         rows.data,
                         rows.stride,
                         optional_data(weight, weight_holder),
                         optional_data(residual, residual_holder),
                         factor ? factor->const_data_ptr() : nullptr,
                         out.mutable_data_ptr(),
                         rows.columns,
                         eps,
                         static_cast<float>(weight_offset)};
  const auto kernel = use_avx2() ? rms_norm_avx2 : rms_norm_portable;
  for_each_range(rows.rows, 2 * rows.rows * rows.columns * element_size(dtype),
                 [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
  return out;
}

HF_FASTPATH_KERNEL(CPU, "rms_norm", rms_norm_cpu)

}  // namespace hf_fastpath
