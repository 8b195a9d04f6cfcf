// What the glue of choose_experts checks on every device. This header is torch-facing.
#pragma once

#include <algorithm>

#include "choose_experts/choose_experts_params.h"
#include "common/torch_glue.h"

namespace hf_fastpath {

// What a router does with its logits.
struct RouterArguments {
  bool normalized, rounded;
  int64_t scoring;
  const std::optional<Tensor>& correction_bias;
  int64_t num_groups, top_groups, group_tops;
  double factor, sum_eps;

  // Whether logits alone say who is chosen, and scores are not changed behind softmax.
  bool is_plain() const {
    return scoring == number_of(Scoring::kSoftmax) && !correction_bias && num_groups == 1 && factor == 1.0 &&
           sum_eps == 0.0;
  }
};

// The same for kernels.
inline RouterParams router_params(const RouterArguments& router, int64_t num_experts, int64_t top_k) {
  RouterParams p{};
  p.num_experts = static_cast<int>(num_experts), p.top_k = static_cast<int>(top_k);
  p.normalized = router.normalized, p.rounded = router.rounded, p.is_plain = router.is_plain();
  p.scoring = static_cast<Scoring>(router.scoring);
  if (router.correction_bias) {
    p.bias = router.correction_bias->data_ptr();
    p.bias_dtype = dtype_of(*router.correction_bias, "choose_experts");
  }
  p.num_groups = static_cast<int>(router.num_groups);
  p.top_groups = static_cast<int>(router.top_groups);
  p.group_tops = static_cast<int>(router.group_tops);
  p.factor = static_cast<float>(router.factor), p.sum_eps = static_cast<float>(router.sum_eps);
  return p;
}

// Refuses arguments that do not go with `num_experts` scores. Returns how many experts a row may choose.
inline int64_t check_router(const RouterArguments& router, int64_t num_experts, const char* op) {
  choice_of(router.scoring, Scoring::kSigmoid, op, "scoring");
  if (router.correction_bias) {
    dtype_of(*router.correction_bias, op);
    STD_TORCH_CHECK(router.correction_bias->dim() == 1 && router.correction_bias->size(0) == num_experts &&
                        router.correction_bias->is_contiguous(),
                    "hf_fastpath::", op, ": correction_bias has to be [", num_experts, "], contiguous");
  }
  const int64_t groups = router.num_groups;
  STD_TORCH_CHECK(groups >= 1 && groups <= kMaxGroups && num_experts % groups == 0, "hf_fastpath::", op,
                  ": num_groups is ", groups, " of ", num_experts, " experts, expected 1 to ", kMaxGroups,
                  " of equal size");
  STD_TORCH_CHECK(router.top_groups >= 1 && router.top_groups <= groups, "hf_fastpath::", op,
                  ": top_groups is ", router.top_groups, ", expected 1 to ", groups);
  const int64_t most_tops = std::min<int64_t>(2, num_experts / groups);
  STD_TORCH_CHECK(groups == 1 || (router.group_tops >= 1 && router.group_tops <= most_tops),
                  "hf_fastpath::", op, ": group_tops is ", router.group_tops, ", expected 1 to ", most_tops);
  STD_TORCH_CHECK(router.sum_eps >= 0, "hf_fastpath::", op, ": sum_eps is ", router.sum_eps,
                  ", expected 0 or more");
  return std::min<int64_t>(kMaxChoices, num_experts / groups * router.top_groups);
}

inline void check_choose_experts(const Tensor& logits, const Tensor& expert_ids,
                                 const RouterArguments& router) {
  dtype_of(logits, "choose_experts");
  STD_TORCH_CHECK(logits.dim() == 2 && logits.size(1) >= 1 && logits.size(1) <= kMaxRoutedTo,
                  "hf_fastpath::choose_experts: logits has to be [rows, 1 to ", kMaxRoutedTo, "]");
  const int64_t most = check_router(router, logits.size(1), "choose_experts");
  STD_TORCH_CHECK(expert_ids.scalar_type() == ScalarType::Long && expert_ids.dim() == 2 &&
                      expert_ids.size(0) == logits.size(0) && expert_ids.size(1) >= 1 &&
                      expert_ids.size(1) <= most && expert_ids.is_contiguous(),
                  "hf_fastpath::choose_experts: expert_ids has to be int64 [", logits.size(0), ", 1 to ",
                  most, "], contiguous");
}

// Refuses scores of a router, [..., num_experts], that are not for the experts with these weights, or for the
// ones from first_expert on. Returns the number of scores.
inline int64_t check_scores(const Tensor& logits, const Tensor& down_weight,
                            const std::optional<int64_t>& first_expert) {
  dtype_of(logits, "routed_experts");
  STD_TORCH_CHECK(down_weight.dim() == 3 && logits.dim() >= 1 && logits.numel() > 0 &&
                      logits.size(logits.dim() - 1) <= kMaxRoutedTo,
                  "hf_fastpath::routed_experts: logits has to be [..., num_experts] for at most ",
                  kMaxRoutedTo, " experts");
  const int64_t scored = logits.size(logits.dim() - 1), held = down_weight.size(0);
  STD_TORCH_CHECK(first_expert ? *first_expert >= 0 && *first_expert <= scored - held : scored == held,
                  "hf_fastpath::routed_experts: logits scores ", scored, " experts, the weights are of ",
                  held, " from ", first_expert.value_or(0), " on");
  return scored;
}

// Uninitialized float32 tensor of `like`'s shape and device.
inline Tensor empty_weights(const Tensor& like) {
  return torch::stable::new_empty(like, {like.size(0), like.size(1)}, ScalarType::Float);
}

// The op, whose other arguments are in `router`.
Tensor chosen_experts_cpu(const Tensor& logits, const Tensor& expert_ids, const RouterArguments& router);
Tensor chosen_experts_cuda(const Tensor& logits, const Tensor& expert_ids, const RouterArguments& router,
                           bool programmatic_launch);

}  // namespace hf_fastpath
