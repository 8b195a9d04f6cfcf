// torch.ops.hf_fastpath.gemv_swiglu on a GPU: see hf_fastpath/ops/gemv_swiglu.py for the contract. The gated
// variant of the gemv kernels over two weights where the model keeps them.
#include "gemv/gemv_cuda_glue.h"

namespace hf_fastpath {

Tensor gemv_swiglu_cuda(const Tensor& x, const Tensor& gate_weight, const Tensor& up_weight,
                        int64_t activation, int64_t norm, const std::optional<Tensor>& norm_weight,
                        const std::optional<Tensor>& norm_bias, double norm_eps, bool programmatic_launch,
                        const std::optional<Tensor>& next_weight) {
  constexpr const char* kOp = "gemv_swiglu";
  const DeviceGuard guard(x);
  const Tensor input = gemv_input(x);
  GemvParams p = gemv_params(input, kOp);
  p.gated = true;
  p.programmatic_launch = programmatic_launch;
  set_next_weight(p, next_weight);
  const InputNorm input_norm(input, norm, norm_weight, norm_bias, norm_eps, kOp);
  p.activation = activation_of(activation, kOp);
  add_segment(p, gate_weight, std::nullopt, kOp);
  add_segment(p, up_weight, std::nullopt, kOp);
  STD_TORCH_CHECK(gate_weight.size(0) == up_weight.size(0),
                  "hf_fastpath::gemv_swiglu: gate_weight and up_weight differ in shape");
  p.n = static_cast<int>(gate_weight.size(0));  // both weights make one set of features
  Tensor out = empty_like_with_sizes(input, sizes_with_last(input, p.n));
  p.out = out.data_ptr();
  input_norm.launch(p, input, current_stream(guard.device()));
  return out;
}

HF_FASTPATH_KERNEL(CUDA, "gemv_swiglu", gemv_swiglu_cuda)

}  // namespace hf_fastpath
