// torch.ops.hf_fastpath.rms_norm on a GPU: see hf_fastpath/ops/rms_norm.py for the contract.
#include "common/composed_ops.h"
#include "common/cuda_glue.h"
#include "rms_norm/rms_norm.h"

namespace hf_fastpath {

Tensor rms_norm_cuda(const Tensor& x, const std::optional<Tensor>& weight, double eps,
                     const std::optional<Tensor>& residual, double weight_offset, bool programmatic_launch,
                     const std::optional<Tensor>& factor) {
  constexpr const char* kOp = "rms_norm";
  STD_TORCH_CHECK(x.dim() >= 1 && (!weight || (weight->dim() == 1 && weight->size(0) == x.size(x.dim() - 1) &&
                                               dtype_of(*weight, kOp) == dtype_of(x, kOp))),
                  "hf_fastpath::rms_norm: weight does not match x's last dimension and dtype");
  check_residual(x, residual, kOp);
  check_factor(x, factor, kOp);
  const DeviceGuard guard(x);
  const Tensor input = hf_fastpath::contiguous(x);
  std::optional<Tensor> scale, more;
  if (weight) scale = hf_fastpath::contiguous(*weight);
  if (residual) more = hf_fastpath::contiguous(*residual);
  Tensor out = empty_like_with_sizes(input, sizes_of(input));
  const int64_t columns = x.size(x.dim() - 1);
  if (input.numel() > 0) {
    launch_rms_norm(input.data_ptr(), data_or_null(scale), data_or_null(more), data_or_null(factor),
                    out.data_ptr(), input.numel() / columns, columns, static_cast<float>(eps),
                    static_cast<float>(weight_offset), programmatic_launch, dtype_of(input, kOp),
                    current_stream(guard.device()));
  }
  return out;
}

HF_FASTPATH_KERNEL(CUDA, "rms_norm", rms_norm_cuda)

}  // namespace hf_fastpath
