// add_rms_norm on the CPU: checks, allocation, threads, and the portable kernel.
#include "add_rms_norm/add_rms_norm_cpu.h"

#include "common/composed_ops.h"
#include "common/cpu_glue.h"
#include "common/cpu_math.h"

namespace hf_fastpath {

void add_rms_norm_portable(const AddRmsNormArgs& args, int64_t begin, int64_t end) {
  with_storage(args.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const T* weight = static_cast<const T*>(args.weight);
    const int64_t n = args.hidden_size;
    for (int64_t row = begin; row < end; ++row) {
      const T* x = static_cast<const T*>(args.x) + row * n;
      const float* residual = args.residual + row * n;
      float* sum = args.sum + row * n;
      T* out = static_cast<T*>(args.out) + row * n;
      double total = 0;
      for (int64_t i = 0; i < n; ++i) {
        sum[i] = residual[i] + to_float(x[i]);
        total += double(sum[i]) * sum[i];
      }
      const float mean = static_cast<float>(total / static_cast<double>(n));
      const float scale = 1.0f / std::sqrt(mean + static_cast<float>(args.eps));
      for (int64_t i = 0; i < n; ++i) from_float(sum[i] * scale * to_float(weight[i]), out + i);
    }
  });
}

std::vector<Tensor> add_rms_norm_cpu(const Tensor& x, const Tensor& residual, const Tensor& weight,
                                     double eps, bool /*programmatic_launch*/) {
  const char* op = "add_rms_norm";
  check_added(x, residual, weight, op);
  const Tensor input = hf_fastpath::contiguous(x), wide = hf_fastpath::contiguous(residual);
  const Tensor scale = hf_fastpath::contiguous(weight);
  Tensor out = empty_like_with_sizes(input, sizes_of(input)),
         sum = empty_like_with_sizes(wide, sizes_of(wide));
  const int64_t columns = scale.size(0), rows = columns ? input.numel() / columns : 0;
  const DType dtype = dtype_of(input, op);
  const AddRmsNormArgs args{dtype,
                            input.const_data_ptr(),
                            static_cast<const float*>(wide.const_data_ptr()),
                            scale.const_data_ptr(),
                            out.mutable_data_ptr(),
                            static_cast<float*>(sum.mutable_data_ptr()),
                            columns,
                            eps};
  const auto kernel = use_avx2() ? add_rms_norm_avx2 : add_rms_norm_portable;
  for_each_range(rows, 2 * rows * columns * (element_size(dtype) + int64_t(sizeof(float))),
                 [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
  return {out, sum};
}

HF_FASTPATH_KERNEL(CPU, "add_rms_norm", add_rms_norm_cpu)

}  // namespace hf_fastpath
