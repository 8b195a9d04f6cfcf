// What a router's choice is made of: plain C++.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace hf_fastpath {

constexpr int kMaxChoices = 32;     // a lane of a warp keeps one
constexpr int kMaxGroups = 32;      // the same
constexpr int kMaxRoutedTo = 1024;  // experts to choose from: 32 a lane

// hf_fastpath/choices.py has the names.
enum class Scoring : int { kSoftmax = 0, kSigmoid = 1 };

// How a router chooses of a row's logits: see hf_fastpath/ops/choose_experts.py.
struct RouterParams {
  int num_experts, top_k;
  bool normalized;   // weights of a row are divided by their sum + sum_eps
  bool rounded;      // to the logits' dtype
  bool is_plain;     // logits alone say who is chosen, and what is below has no effect
  Scoring scoring;   // scores of logits
  const void* bias;  // [num_experts], added to scores for the choice alone, or null
  DType bias_dtype;
  int num_groups, top_groups, group_tops;
  float factor, sum_eps;
};

struct ChooseExpertsParams {
  const void* logits;  // [rows, num_experts], contiguous
  int64_t* ids;        // [rows, top_k], written
  float* weights;      // [rows, top_k], written
  int rows;
  RouterParams router;
  DType dtype;               // of the logits
  bool programmatic_launch;  // may start before the kernel in front on the stream is complete
};

}  // namespace hf_fastpath
