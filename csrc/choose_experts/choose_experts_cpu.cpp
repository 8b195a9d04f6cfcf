// choose_experts on the CPU. A row is a few hundred scores: one thread, no vector instructions.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "choose_experts/choose_experts_glue.h"
#include "common/convert_cpu.h"
#include "common/cpu_glue.h"
#include "common/cpu_math.h"

namespace hf_fastpath {
namespace {

// Whether `one` comes before `other`, which is behind it in order.
bool is_larger(float one, float other) { return one > other || (std::isnan(one) && !std::isnan(other)); }

// The place of the largest of `count` values that are not taken, which is then taken.
int64_t take_largest(const float* values, bool* taken, int64_t count) {
  int64_t best = -1;
  for (int64_t i = 0; i < count; ++i) {
    if (!taken[i] && (best < 0 || is_larger(values[i], values[best]))) best = i;
  }
  taken[best] = true;
  return best;
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

// Takes the experts of all groups but those of the largest sums.
void take_other_groups(const float* ranked, bool* taken, int64_t count, const RouterArguments& router) {
  const int64_t groups = router.num_groups, size = count / groups;
  float sums[kMaxGroups];
  bool is_in[kMaxGroups] = {};
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t first = group * size;
    sums[group] = 0.0f;
    for (int64_t i = 0; i < router.group_tops; ++i)
      sums[group] += ranked[first + take_largest(ranked + first, taken + first, size)];
  }
  for (int64_t i = 0; i < router.top_groups; ++i) take_largest(sums, is_in, groups);
  for (int64_t i = 0; i < count; ++i) taken[i] = !is_in[i / size];
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
  float* const ranked = scores + num_experts;
  float* const bias = ranked + num_experts;
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
      for (int64_t i = 0; i < num_experts; ++i) ranked[i] = scores[i] + bias[i];
      bool taken[kMaxRoutedTo] = {};
      if (router.num_groups > 1) take_other_groups(ranked, taken, num_experts, router);
      int64_t* const ids = all_ids + row * top_k;
      float* const weights = all_weights + row * top_k;
      for (int64_t k = 0; k < top_k; ++k) {
        ids[k] = take_largest(ranked, taken, num_experts);
        weights[k] = scores[ids[k]];
      }
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

STABLE_TORCH_LIBRARY_IMPL(hf_fastpath, CPU, m) { m.impl("choose_experts", TORCH_BOX(&choose_experts_cpu)); }

}  // namespace hf_fastpath
