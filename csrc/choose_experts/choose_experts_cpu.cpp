// choose_experts on the CPU. A row is a few hundred scores: one thread, no vector instructions.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "choose_experts/choose_experts_glue.h"
#include "common/convert_cpu.h"
#include "common/cpu_glue.h"
#include "common/cpu_math.h"

namespace hf_fastpath {
namespace {

// The `count` largest of some values with their places, in front of `ranked`, descending, NaN first. Which of
// equal values are among them is what torch.topk on the CPU makes of the same algorithms of the standard
// library (aten/src/ATen/native/TopKImpl.h): a router whose weights are zeros then chooses as stock's does.
void rank(const float* values, int64_t all, int64_t count, std::vector<std::pair<float, int64_t>>& ranked) {
  ranked.resize(all);
  for (int64_t i = 0; i < all; ++i) ranked[i] = {values[i], i};
  const auto is_in_front = [](const auto& one, const auto& other) {
    return one.first > other.first || (std::isnan(one.first) && !std::isnan(other.first));
  };
  if (count * 64 <= all) {
    std::partial_sort(ranked.begin(), ranked.begin() + count, ranked.end(), is_in_front);
  } else {
    std::nth_element(ranked.begin(), ranked.begin() + count - 1, ranked.end(), is_in_front);
    std::sort(ranked.begin(), ranked.begin() + count - 1, is_in_front);
  }
}

// Scores of logits, in place.
void score(float* values, int64_t count, Scoring scoring) {
  if (scoring == Scoring::kSigmoid) {
    for (int64_t i = 0; i < count; ++i) values[i] = 1.0f / (1.0f + std::exp(-values[i]));
    return;
  }
  float top = -INFINITY;
  for (int64_t i = 0; i < count; ++i) top = std::max(top, values[i]);  // NaN is passed over
  double total = 0.0;
  for (int64_t i = 0; i < count; ++i) {
    values[i] = std::exp(values[i] - top);
    total += values[i];
  }
  for (int64_t i = 0; i < count; ++i) values[i] = static_cast<float>(values[i] / total);
}

// Hides the experts of all groups but those of the largest sums.
void hide_other_groups(float* values, int64_t count, const RouterArguments& router,
                       std::vector<std::pair<float, int64_t>>& ranked) {
  const int64_t groups = router.num_groups, size = count / groups;
  float sums[kMaxGroups];
  bool is_in[kMaxGroups] = {};
  for (int64_t group = 0; group < groups; ++group) {
    rank(values + group * size, size, router.group_tops, ranked);
    sums[group] = 0.0f;
    for (int64_t i = 0; i < router.group_tops; ++i) sums[group] += ranked[i].first;
  }
  rank(sums, groups, router.top_groups, ranked);
  for (int64_t i = 0; i < router.top_groups; ++i) is_in[ranked[i].second] = true;
  for (int64_t i = 0; i < count; ++i) values[i] = is_in[i / size] ? values[i] : -INFINITY;
}

}  // namespace

Tensor chosen_experts_cpu(const Tensor& logits, const Tensor& expert_ids, const RouterArguments& router) {
  check_choose_experts(logits, expert_ids, router);
  const Tensor given = hf_fastpath::contiguous(logits);
  const int64_t rows = logits.size(0), num_experts = logits.size(1), top_k = expert_ids.size(1);
  const auto convert = use_avx2() ? convert_to_float_avx2 : convert_to_float_portable;
  Tensor out = empty_weights(expert_ids);
  int64_t* const all_ids = static_cast<int64_t*>(expert_ids.data_ptr());
  float* const all_weights = static_cast<float*>(out.data_ptr());
  float* const scores = scratch(3 * num_experts);
  float* const values = scores + num_experts;
  float* const bias = values + num_experts;
  std::vector<std::pair<float, int64_t>> ranked;
  std::fill(bias, bias + num_experts, 0.0f);
  if (router.correction_bias) {
    const Tensor& from = *router.correction_bias;
    convert(dtype_of(from, "choose_experts"), from.const_data_ptr(), bias, num_experts);
  }
  with_storage(dtype_of(logits, "choose_experts"), [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    for (int64_t row = 0; row < rows; ++row) {
      const T* from = static_cast<const T*>(given.const_data_ptr()) + row * num_experts;
      for (int64_t i = 0; i < num_experts; ++i) scores[i] = to_float(from[i]);
      score(scores, num_experts, static_cast<Scoring>(router.scoring));
      for (int64_t i = 0; i < num_experts; ++i) values[i] = scores[i] + bias[i];
      if (router.num_groups > 1) hide_other_groups(values, num_experts, router, ranked);
      rank(values, num_experts, top_k, ranked);
      int64_t* const ids = all_ids + row * top_k;
      float* const weights = all_weights + row * top_k;
      for (int64_t k = 0; k < top_k; ++k) ids[k] = ranked[k].second, weights[k] = scores[ids[k]];
      const double sum = std::accumulate(weights, weights + top_k, 0.0) + router.sum_eps;
      for (int64_t k = 0; k < top_k; ++k) {
        const double weight = router.normalized ? weights[k] / sum : weights[k];
        weights[k] = static_cast<float>(weight * router.factor);
        T value;
        from_float(weights[k], &value);
        if (router.rounded) weights[k] = to_float(value);
      }
    }
  });
  return out;
}

Tensor choose_experts_cpu(const Tensor& logits, const Tensor& expert_ids, bool normalized, bool rounded,
                          bool /*programmatic_launch*/, int64_t scoring,
                          const std::optional<Tensor>& correction_bias, int64_t num_groups,
                          int64_t top_groups, int64_t group_tops, double factor, double sum_eps) {
  return chosen_experts_cpu(
      logits, expert_ids,
      {normalized, rounded, scoring, correction_bias, num_groups, top_groups, group_tops, factor, sum_eps});
}

HF_FASTPATH_KERNEL(CPU, "choose_experts", choose_experts_cpu)

}  // namespace hf_fastpath
