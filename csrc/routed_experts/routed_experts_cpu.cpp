// torch.ops.hf_fastpath.routed_experts on the CPU: the norm, choose_experts, fused_experts, then the shared
// expert's products.
#include "choose_experts/choose_experts_glue.h"
#include "common/composed_ops.h"
#include "common/cpu_glue.h"
#include "routed_experts/shared_expert_glue.h"

namespace hf_fastpath {

Tensor fused_experts_cpu(const Tensor& x, const Tensor& expert_ids, const Tensor& expert_weights,
                         const Tensor& gate_up_weight, const Tensor& down_weight,
                         const std::optional<Tensor>& residual, int64_t activation, bool programmatic_launch,
                         const std::optional<Tensor>& gate_up_bias, const std::optional<Tensor>& down_bias,
                         bool transposed, double alpha, double limit, bool concatenated);

Tensor routed_experts_cpu(
    const Tensor& x, const Tensor& logits, const Tensor& gate_up_weight, const Tensor& down_weight,
    int64_t top_k, const std::optional<Tensor>& residual, bool normalized, bool rounded, int64_t activation,
    bool programmatic_launch, const std::optional<Tensor>& gate_up_bias,
    const std::optional<Tensor>& down_bias, bool transposed, double alpha, double limit, bool concatenated,
    const std::optional<int64_t>& first_expert, int64_t norm, const std::optional<Tensor>& norm_weight,
    const std::optional<Tensor>& norm_bias, double norm_eps, const std::optional<Tensor>& shared_gate_weight,
    const std::optional<Tensor>& shared_up_weight, const std::optional<Tensor>& shared_down_weight,
    const std::optional<Tensor>& shared_logits, int64_t scoring, const std::optional<Tensor>& correction_bias,
    int64_t num_groups, int64_t top_groups, int64_t group_tops, double factor, double sum_eps) {
  const int64_t num_experts = check_scores(logits, down_weight, first_expert),
                rows = logits.numel() / num_experts;
  const SharedWeights shared{shared_gate_weight, shared_up_weight, shared_down_weight, shared_logits};
  check_shared(shared, x, rows, "routed_experts");
  const Tensor scores = torch::stable::view(hf_fastpath::contiguous(logits), {rows, num_experts});
  const Tensor ids = torch::stable::new_empty(scores, {rows, top_k}, ScalarType::Long);
  const Tensor weights = chosen_experts_cpu(
      scores, ids,
      {normalized, rounded, scoring, correction_bias, num_groups, top_groups, group_tops, factor, sum_eps});
  if (first_expert) {  // others, of which nothing is to be added, fall out of the range
    int64_t* const chosen = static_cast<int64_t*>(ids.data_ptr());
    for (int64_t i = 0; i < rows * top_k; ++i) chosen[i] -= *first_expert;
  }
  const Tensor input = normed_cpu(x, norm_of(norm, "routed_experts"), norm_weight, norm_bias, norm_eps);
  const Tensor chosen =
      fused_experts_cpu(input, ids, weights, gate_up_weight, down_weight, residual, activation,
                        programmatic_launch, gate_up_bias, down_bias, transposed, alpha, limit, concatenated);
  if (!shared.are_there()) return chosen;
  return with_shared_cpu(chosen, shared, input, activation, NormKind::kNone, std::nullopt, std::nullopt, 0.0,
                         programmatic_launch);
}

HF_FASTPATH_KERNEL(CPU, "routed_experts", routed_experts_cpu)

}  // namespace hf_fastpath
