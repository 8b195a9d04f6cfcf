// torch.ops.hf_fastpath.fake_quantize on a GPU: see hf_fastpath/ops/fake_quantize.py for the contract.
#include "common/composed_ops.h"
#include "common/cuda_glue.h"
#include "fake_quantize/fake_quantize.h"
#include "fake_quantize/fake_quantize_glue.h"

namespace hf_fastpath {

Tensor fake_quantize_cuda(const Tensor& raw, int64_t quants, double limit, int64_t norm,
                          const std::optional<Tensor>& norm_weight, const std::optional<Tensor>& norm_bias,
                          double norm_eps, bool programmatic_launch) {
  const char* op = "fake_quantize";
  const DeviceGuard guard(raw);
  const NormKind kind = norm_of(norm, op);
  std::optional<Tensor> weight;
  if (is_rms(kind) && norm_weight) {
    STD_TORCH_CHECK(norm_weight->dim() == 1 && norm_weight->size(0) == raw.size(raw.dim() - 1) &&
                        dtype_of(*norm_weight, op) == dtype_of(raw, op) && !norm_bias,
                    "hf_fastpath::fake_quantize: norm_weight does not match x's last dimension and dtype");
    FakeQuantizeCall call(raw, quants, limit, programmatic_launch);
    weight = hf_fastpath::contiguous(*norm_weight);
    call.params.norm_weight = weight->data_ptr(), call.params.norm_eps = static_cast<float>(norm_eps);
    call.params.norm_offset = weight_offset(kind);
    if (launch_normed_fake_quantize(call.params, current_stream(guard.device()))) return call.out;
  }
  const Tensor x = kind == NormKind::kNone ? raw : normed_cuda(raw, kind, norm_weight, norm_bias, norm_eps);
  FakeQuantizeCall call(x, quants, limit, programmatic_launch);
  std::optional<Tensor> marks;
  if (call.marks_columns()) {
    marks = call.empty_marks(x);
    call.params.marks = static_cast<uint8_t*>(marks->mutable_data_ptr());
  }
  launch_fake_quantize(call.params, current_stream(guard.device()));
  return call.out;
}

HF_FASTPATH_KERNEL(CUDA, "fake_quantize", fake_quantize_cuda)

}  // namespace hf_fastpath
