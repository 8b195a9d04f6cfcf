// Products of the same rows with several weights, their features side by side. This header is torch-facing,
// and *_cpu.cpp alone include it.
#pragma once

#include "gemv/gemv_glue_cpu.h"

namespace hf_fastpath {

constexpr size_t kMaxProjections = 4;

struct Projection {
  Tensor weight;
  std::optional<Tensor> bias;
  const char *weight_name, *bias_name;  // for errors
};

// x @ weight.T + bias of 1 to kMaxProjections projections in one parallel region, [..., features of all].
inline Tensor side_by_side(const Tensor& x, const std::vector<Projection>& projections, const char* op) {
  const Activations input = load_activations(x, op, true);
  int64_t total = 0;
  for (const Projection& each : projections) {
    check_weight(each.weight, input, false, op, each.weight_name);
    check_vector(each.bias, each.weight.size(0), input.dtype, op, each.bias_name);
    total += each.weight.size(0);
  }
  Tensor out = empty_like_with_sizes(x, sizes_with_last(x, total));
  void* const to = out.mutable_data_ptr();
  std::optional<Tensor> holders[kMaxProjections];
  LinearArgs args[kMaxProjections];
  int64_t first[kMaxProjections + 1] = {};  // first output of each projection among all of them
  const size_t count = projections.size();
  for (size_t i = 0; i < count; ++i) {
    args[i] = linear_args(input, projections[i].weight, false, at(to, first[i], input.dtype), total);
    args[i].bias = optional_data(projections[i].bias, holders[i]);
    first[i + 1] = first[i] + args[i].out_features;
  }
  Linear* const kernel = input.kernel;
  share_outputs(total, input.in_features * element_size(input.dtype), [&](int64_t begin, int64_t end) {
    for (size_t i = 0; i < count; ++i) {
      const int64_t from = std::max(begin, first[i]), stop = std::min(end, first[i + 1]);
      if (from < stop) kernel(args[i], from - first[i], stop - first[i]);
    }
  });
  return out;
}

}  // namespace hf_fastpath
