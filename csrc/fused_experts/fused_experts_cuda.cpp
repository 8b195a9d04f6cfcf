// torch.ops.hf_fastpath.fused_experts on a GPU: see hf_fastpath/ops/fused_experts.py for the contract.
#include "fused_experts/fused_experts_cuda_glue.h"

namespace hf_fastpath {

Tensor fused_experts_cuda(const Tensor& x, const Tensor& expert_ids, const Tensor& expert_weights,
                          const Tensor& gate_up_weight, const Tensor& down_weight,
                          const std::optional<Tensor>& residual, int64_t activation, bool programmatic_launch,
                          const std::optional<Tensor>& gate_up_bias, const std::optional<Tensor>& down_bias,
                          bool transposed, double alpha, double limit, bool concatenated) {
  const DeviceGuard guard(x);
  STD_TORCH_CHECK(expert_ids.scalar_type() == ScalarType::Long && expert_ids.dim() == 2,
                  "hf_fastpath::fused_experts: expert_ids has to be int64 [rows, top_k]");
  STD_TORCH_CHECK(
      expert_weights.scalar_type() == ScalarType::Float && sizes_of(expert_weights) == sizes_of(expert_ids),
      "hf_fastpath::fused_experts: expert_weights has to be float32 of expert_ids' shape");
  ExpertsOnGpu call("fused_experts", x, expert_ids.size(0), expert_ids.size(1), gate_up_weight, down_weight,
                    residual, activation, programmatic_launch, gate_up_bias, down_bias, transposed, alpha,
                    limit, concatenated);
  call.params.expert_ids = static_cast<const int64_t*>(call.keep(expert_ids).data_ptr());
  call.params.expert_weights = static_cast<const float*>(call.keep(expert_weights).data_ptr());
  return call.launch(current_stream(guard.device()));
}

HF_FASTPATH_KERNEL(CUDA, "fused_experts", fused_experts_cuda)

}  // namespace hf_fastpath
