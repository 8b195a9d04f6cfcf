// fake_quantize on the CPU: checks, threads, and the portable kernel.
#include "common/composed_ops.h"
#include "common/cpu_glue.h"
#include "fake_quantize/fake_quantize_glue.h"
#include "fake_quantize/fake_quantize_row.h"

namespace hf_fastpath {

void fake_quantize_portable(const FakeQuantizeParams& params, int64_t begin, int64_t end, float* row) {
  fake_quantize_rows(params, begin, end, row);
}
void mark_outliers_portable(const FakeQuantizeParams& params, int64_t begin, int64_t end) {
  mark_columns(params, begin, end);
}

Tensor fake_quantize_cpu(const Tensor& raw, int64_t quants, double limit, int64_t norm,
                         const std::optional<Tensor>& norm_weight, const std::optional<Tensor>& norm_bias,
                         double norm_eps, bool /*programmatic_launch*/) {
  const Tensor x = normed_cpu(raw, norm_of(norm, "fake_quantize"), norm_weight, norm_bias, norm_eps);
  FakeQuantizeCall call(x, quants, limit, false);
  FakeQuantizeParams& params = call.params;
  const int64_t bytes = 2 * params.rows * params.columns * element_size(params.dtype);
  const bool is_avx2 = use_avx2();
  std::optional<Tensor> marks;
  if (call.marks_columns()) {
    constexpr int64_t kColumns = 64;  // of a thread, at least: a line of marks
    marks = call.empty_marks(x);
    params.marks = static_cast<uint8_t*>(marks->mutable_data_ptr());
    const auto mark = is_avx2 ? mark_outliers_avx2 : mark_outliers_portable;
    for_each_range((params.columns + kColumns - 1) / kColumns, bytes, [&](int64_t begin, int64_t end) {
      mark(params, begin * kColumns, std::min(end * kColumns, params.columns));
    });
  }
  const auto kernel = is_avx2 ? fake_quantize_avx2 : fake_quantize_portable;
  for_each_range(params.rows, bytes,
                 [&](int64_t begin, int64_t end) { kernel(params, begin, end, scratch(params.columns)); });
  return call.out;
}

HF_FASTPATH_KERNEL(CPU, "fake_quantize", fake_quantize_cpu)

}  // namespace hf_fastpath
