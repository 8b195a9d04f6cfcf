// torch.ops.hf_fastpath.layer_norm on a GPU: see hf_fastpath/ops/layer_norm.py for the contract.
#include "common/composed_ops.h"
#include "common/cuda_glue.h"
#include "layer_norm/layer_norm.h"

namespace hf_fastpath {

Tensor layer_norm_cuda(const Tensor& x, const std::optional<Tensor>& weight,
                       const std::optional<Tensor>& bias, double eps, const std::optional<Tensor>& residual) {
  constexpr const char* kOp = "layer_norm";
  STD_TORCH_CHECK(x.dim() >= 1, "hf_fastpath::layer_norm: x is a scalar, expected [..., hidden_size]");
  const int64_t columns = x.size(x.dim() - 1);
  std::optional<Tensor> scale, shift;
  for (auto [given, kept] : {std::pair(&weight, &scale), std::pair(&bias, &shift)}) {
    if (!*given) continue;
    STD_TORCH_CHECK(
        (*given)->dim() == 1 && (*given)->size(0) == columns && dtype_of(**given, kOp) == dtype_of(x, kOp),
        "hf_fastpath::layer_norm: weight or bias does not match x's last dimension and dtype");
    *kept = hf_fastpath::contiguous(**given);
  }
  check_residual(x, residual, kOp);
  const DeviceGuard guard(x);
  const Tensor input = hf_fastpath::contiguous(x);
  std::optional<Tensor> more;
  if (residual) more = hf_fastpath::contiguous(*residual);
  Tensor out = empty_like_with_sizes(input, sizes_of(input));
  if (input.numel() > 0) {
    launch_layer_norm(input.data_ptr(), data_or_null(scale), data_or_null(shift), data_or_null(more),
                      out.data_ptr(), input.numel() / columns, columns, static_cast<float>(eps),
                      dtype_of(input, kOp), current_stream(guard.device()));
  }
  return out;
}

HF_FASTPATH_KERNEL(CUDA, "layer_norm", layer_norm_cuda)

}  // namespace hf_fastpath
