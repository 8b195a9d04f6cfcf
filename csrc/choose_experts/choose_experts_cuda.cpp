// torch.ops.hf_fastpath.choose_experts on a GPU: see hf_fastpath/ops/choose_experts.py for the contract.
#include "choose_experts/choose_experts.h"
#include "choose_experts/choose_experts_glue.h"
#include "common/cuda_glue.h"

namespace hf_fastpath {

Tensor chosen_experts_cuda(const Tensor& logits, const Tensor& expert_ids, const RouterArguments& router,
                           bool programmatic_launch) {
  const DeviceGuard guard(logits);
  check_choose_experts(logits, expert_ids, router);
  const Tensor given = hf_fastpath::contiguous(logits);
  Tensor out = empty_weights(expert_ids);
  ChooseExpertsParams p{};
  p.logits = given.data_ptr();
  p.ids = static_cast<int64_t*>(expert_ids.data_ptr());
  p.weights = static_cast<float*>(out.data_ptr());
  p.rows = static_cast<int>(logits.size(0));
  p.router = router_params(router, logits.size(1), expert_ids.size(1));
  p.dtype = dtype_of(logits, "choose_experts");
  p.programmatic_launch = programmatic_launch;
  if (p.rows > 0) launch_choose_experts(p, current_stream(guard.device()));
  return out;
}

Tensor choose_experts_cuda(const Tensor& logits, const Tensor& expert_ids, bool normalized, bool rounded,
                           bool programmatic_launch, int64_t scoring,
                           const std::optional<Tensor>& correction_bias, int64_t num_groups,
                           int64_t top_groups, int64_t group_tops, double factor, double sum_eps) {
  return chosen_experts_cuda(
      logits, expert_ids,
      {normalized, rounded, scoring, correction_bias, num_groups, top_groups, group_tops, factor, sum_eps},
      programmatic_launch);
}

HF_FASTPATH_KERNEL(CUDA, "choose_experts", choose_experts_cuda)

}  // namespace hf_fastpath
