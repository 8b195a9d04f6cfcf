// torch.ops.hf_fastpath.gemv_qkv on a GPU: see hf_fastpath/ops/gemv_qkv.py for the contract. One launch of
// the gemv kernels over three weights where the model keeps them.
#include "gemv/gemv_cuda_glue.h"

namespace hf_fastpath {
namespace {

Tensor gemv_qkv(const Tensor& x, const Tensor& q_weight, const Tensor& k_weight, const Tensor& v_weight,
                const std::optional<Tensor>& q_bias, const std::optional<Tensor>& k_bias,
                const std::optional<Tensor>& v_bias) {
  constexpr const char* kOp = "gemv_qkv";
  const DeviceGuard guard(x);
  const Tensor input = hf_fastpath::contiguous(x);
  GemvParams p = gemv_params(input, kOp);
  const std::optional<Tensor> kept[] = {add_segment(p, q_weight, q_bias, kOp),
                                        add_segment(p, k_weight, k_bias, kOp),
                                        add_segment(p, v_weight, v_bias, kOp)};
  Tensor out = empty_like_with_sizes(input, sizes_with_last(input, p.n));
  p.out = out.data_ptr();
  static_cast<void>(kept);
  launch_gemv(p, current_stream(guard.device()));
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(hf_fastpath, CUDA, m) { m.impl("gemv_qkv", TORCH_BOX(&gemv_qkv)); }

}  // namespace hf_fastpath
