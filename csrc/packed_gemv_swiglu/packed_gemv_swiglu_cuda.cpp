// torch.ops.hf_fastpath.packed_gemv_swiglu on a GPU: see hf_fastpath/ops/packed_gemv_swiglu.py for the
// contract. The gated format of packed_gemv's kernels.
#include "packed_gemv/packed_gemv_cuda_glue.h"

namespace hf_fastpath {

Tensor packed_gemv_swiglu_cuda(const Tensor& x, const Tensor& quants, const Tensor& scales,
                               const std::optional<Tensor>& zeros, double multiplier, int64_t format,
                               int64_t activation, int64_t norm, const std::optional<Tensor>& norm_weight,
                               const std::optional<Tensor>& norm_bias, double norm_eps,
                               bool programmatic_launch) {
  constexpr const char* kOp = "packed_gemv_swiglu";
  const DeviceGuard guard(x);
  const Tensor input = hf_fastpath::contiguous(x);
  GemvParams p = gemv_params(input, kOp);
  p.activation = activation_of(activation, kOp);
  p.gated = true;
  p.programmatic_launch = programmatic_launch;
  const InputNorm input_norm(input, norm, norm_weight, norm_bias, norm_eps, kOp);
  const PackedTensors weight(p, quants, scales, zeros, multiplier, format, kOp);
  STD_TORCH_CHECK(p.n % 2 == 0, "hf_fastpath::packed_gemv_swiglu: quants have ", p.n,
                  " rows, expected as many of gate as of up");
  p.n /= 2;
  Tensor out = empty_like_with_sizes(input, sizes_with_last(input, p.n));
  p.out = out.data_ptr();
  std::vector<Tensor> kept;
  weight.launch(p, nullptr, input_norm, input, kept, current_stream(guard.device()));
  return out;
}

HF_FASTPATH_KERNEL(CUDA, "packed_gemv_swiglu", packed_gemv_swiglu_cuda)

}  // namespace hf_fastpath
