// What the glue of topk_softmax checks on every device. Torch-facing.
#pragma once

#include <algorithm>

#include "common/torch_glue.h"

namespace hf_fastpath {

inline void check_topk_softmax(const Tensor& logits, const Tensor& expert_ids) {
  constexpr int64_t kMaxChoices = 32, kMaxExperts = 1024;
  dtype_of(logits, "topk_softmax");
  STD_TORCH_CHECK(logits.dim() == 2 && logits.size(1) >= 1 && logits.size(1) <= kMaxExperts,
                  "hf_fastpath::topk_softmax: logits has to be [rows, 1 to ", kMaxExperts, "]");
  const int64_t most = std::min(kMaxChoices, logits.size(1));
  STD_TORCH_CHECK(expert_ids.scalar_type() == ScalarType::Long && expert_ids.dim() == 2 &&
                      expert_ids.size(0) == logits.size(0) && expert_ids.size(1) >= 1 &&
                      expert_ids.size(1) <= most && expert_ids.is_contiguous(),
                  "hf_fastpath::topk_softmax: expert_ids has to be int64 [", logits.size(0), ", 1 to ", most,
                  "], contiguous");
}

// Refuses scores of a router, [..., num_experts], that are not for the experts with these weights, or for the
// ones from first_expert on. Returns the number of scores.
inline int64_t check_scores(const Tensor& logits, const Tensor& down_weight,
                            const std::optional<int64_t>& first_expert) {
  dtype_of(logits, "routed_experts");
  STD_TORCH_CHECK(
      down_weight.dim() == 3 && logits.dim() >= 1 && logits.numel() > 0 &&
          logits.size(logits.dim() - 1) <= 1024,
      "hf_fastpath::routed_experts: logits has to be [..., num_experts] for at most 1024 experts");
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

}  // namespace hf_fastpath
