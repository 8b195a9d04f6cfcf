// torch.ops.hf_fastpath.gemv on a GPU: see hf_fastpath/ops/gemv.py for the contract.
#include "gemv/gemv_cuda_glue.h"

namespace hf_fastpath {

Tensor gemv_cuda(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                 const std::optional<Tensor>& residual, int64_t activation, bool transposed, int64_t norm,
                 const std::optional<Tensor>& norm_weight, const std::optional<Tensor>& norm_bias,
                 double norm_eps, bool programmatic_launch, const std::optional<Tensor>& next_weight) {
  constexpr const char* kOp = "gemv";
  const DeviceGuard guard(x);
  const Tensor input = gemv_input(x);
  GemvParams p = gemv_params(input, kOp);
  p.activation = activation_of(activation, kOp);
  p.transposed = transposed;
  p.programmatic_launch = programmatic_launch;
  set_next_weight(p, next_weight);
  const InputNorm input_norm(input, norm, norm_weight, norm_bias, norm_eps, kOp);
  const std::optional<Tensor> kept = add_segment(p, weight, bias, kOp);
  std::optional<Tensor> added;
  if (residual) {
    STD_TORCH_CHECK(residual->numel() == int64_t(p.m) * p.n && dtype_of(*residual, kOp) == p.dtype,
                    "hf_fastpath::gemv: residual does not match the output's shape and dtype");
    added = hf_fastpath::contiguous(*residual);
    p.residual = added->data_ptr();
  }
  Tensor out = empty_like_with_sizes(input, sizes_with_last(input, p.n));
  p.out = out.data_ptr();
  input_norm.launch(p, input, current_stream(guard.device()));
  return out;
}

HF_FASTPATH_KERNEL(CUDA, "gemv", gemv_cuda)

}  // namespace hf_fastpath
