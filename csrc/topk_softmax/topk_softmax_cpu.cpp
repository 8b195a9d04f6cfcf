// topk_softmax on the CPU. A row is a few hundred scores: one thread, no vector instructions.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "common/cpu_glue.h"
#include "common/cpu_math.h"
#include "topk_softmax/topk_softmax_glue.h"

namespace hf_fastpath {
namespace {

constexpr float kTaken = -1.0f;  // no exponential is negative

// The ids of the largest of one row's values, which are taken out as they are chosen, and these values.
void choose(float* values, int64_t num_experts, int64_t top_k, int64_t* ids, float* chosen) {
  for (int64_t k = 0; k < top_k; ++k) {
    int64_t best = 0;
    while (values[best] == kTaken) ++best;
    for (int64_t i = best + 1; i < num_experts; ++i) {
      if (values[i] > values[best] || (std::isnan(values[i]) && !std::isnan(values[best]))) best = i;
    }
    ids[k] = best;
    chosen[k] = values[best];
    values[best] = kTaken;
  }
}

}  // namespace

Tensor topk_softmax_cpu(const Tensor& logits, const Tensor& expert_ids, bool normalized, bool rounded,
                        bool /*programmatic_launch*/) {
  check_topk_softmax(logits, expert_ids);
  const Tensor scores = hf_fastpath::contiguous(logits);
  const DType dtype = dtype_of(logits, "topk_softmax");
  const int64_t rows = logits.size(0), num_experts = logits.size(1), top_k = expert_ids.size(1);
  Tensor out = empty_weights(expert_ids);
  int64_t* const ids = static_cast<int64_t*>(expert_ids.data_ptr());
  float* const all_weights = static_cast<float*>(out.data_ptr());
  float* const values = scratch(num_experts);
  with_storage(dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    for (int64_t row = 0; row < rows; ++row) {
      const T* from = static_cast<const T*>(scores.const_data_ptr()) + row * num_experts;
      float top = -INFINITY;
      for (int64_t i = 0; i < num_experts; ++i) {
        values[i] = to_float(from[i]);
        top = std::max(top, values[i]);  // NaN is passed over
      }
      double total = 0.0;
      for (int64_t i = 0; i < num_experts; ++i) {
        values[i] = std::exp(values[i] - top);
        total += values[i];
      }
      float* const weights = all_weights + row * top_k;
      choose(values, num_experts, top_k, ids + row * top_k, weights);
      if (normalized) total = std::accumulate(weights, weights + top_k, 0.0);
      for (int64_t k = 0; k < top_k; ++k) {
        weights[k] = static_cast<float>(weights[k] / total);
        T value;
        from_float(weights[k], &value);
        if (rounded) weights[k] = to_float(value);
      }
    }
  });
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(hf_fastpath, CPU, m) { m.impl("topk_softmax", TORCH_BOX(&topk_softmax_cpu)); }

}  // namespace hf_fastpath
