// torch.ops.hf_fastpath.packed_gemv on a GPU: see hf_fastpath/ops/packed_gemv.py for the contract.
#include "packed_gemv/packed_gemv_cuda_glue.h"

namespace hf_fastpath {

Tensor packed_gemv_cuda(const Tensor& x, const Tensor& quants, const Tensor& scales,
                        const std::optional<Tensor>& zeros, double multiplier, int64_t format,
                        const std::optional<Tensor>& bias, const std::optional<Tensor>& residual,
                        int64_t activation, int64_t norm, const std::optional<Tensor>& norm_weight,
                        const std::optional<Tensor>& norm_bias, double norm_eps, bool programmatic_launch,
                        const std::optional<Tensor>& next_weight) {
  constexpr const char* kOp = "packed_gemv";
  const DeviceGuard guard(x);
  const Tensor input = hf_fastpath::contiguous(x);
  GemvParams p = gemv_params(input, kOp);
  p.activation = activation_of(activation, kOp);
  p.programmatic_launch = programmatic_launch;
  set_next_weight(p, next_weight);
  const InputNorm input_norm(input, norm, norm_weight, norm_bias, norm_eps, kOp);
  const PackedTensors weight(p, quants, scales, zeros, multiplier, format, kOp);
  std::optional<Tensor> shift, added;
  if (bias) {
    STD_TORCH_CHECK(bias->numel() == p.n && dtype_of(*bias, kOp) == p.dtype,
                    "hf_fastpath::packed_gemv: bias does not match the weight and x's dtype");
    shift = hf_fastpath::contiguous(*bias);
    p.segments[0].bias = shift->data_ptr();
  }
  if (residual) {
    STD_TORCH_CHECK(residual->numel() == int64_t(p.m) * p.n && dtype_of(*residual, kOp) == p.dtype,
                    "hf_fastpath::packed_gemv: residual does not match the output's shape and dtype");
    added = hf_fastpath::contiguous(*residual);
    p.residual = added->data_ptr();
  }
  Tensor out = empty_like_with_sizes(input, sizes_with_last(input, p.n));
  p.out = out.data_ptr();
  std::vector<Tensor> kept;
  weight.launch(p, nullptr, input_norm, input, kept, current_stream(guard.device()));
  return out;
}

HF_FASTPATH_KERNEL(CUDA, "packed_gemv", packed_gemv_cuda)

}  // namespace hf_fastpath
