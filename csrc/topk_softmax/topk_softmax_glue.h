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

// Refuses scores of a router, [..., num_experts], that are not for the experts with these weights. Returns
// their number.
inline int64_t check_scores(const Tensor& logits, const Tensor& down_weight) {
  dtype_of(logits, "routed_experts");
  STD_TORCH_CHECK(
      down_weight.dim() == 3 && logits.dim() >= 1 && logits.numel() > 0 &&
          logits.size(logits.dim() - 1) == down_weight.size(0) && down_weight.size(0) <= 1024,
      "hf_fastpath::routed_experts: logits has to be [..., num_experts] for at most 1024 experts");
  return down_weight.size(0);
}

// Uninitialized float32 tensor of `like`'s shape and device.
inline Tensor empty_weights(const Tensor& like) {
  return torch::stable::new_empty(like, {like.size(0), like.size(1)}, ScalarType::Float);
}

}  // namespace hf_fastpath
