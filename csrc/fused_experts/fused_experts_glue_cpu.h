// What the two variants of fused_experts share on the CPU. This header is torch-facing, and *_cpu.cpp alone
// include it.
#pragma once

#include "fused_experts/expert_pairs_cpu.h"
#include "fused_experts/fused_experts_glue.h"
#include "gemv/gemv_glue_cpu.h"

namespace hf_fastpath {

// A call after its checks.
struct ExpertsCall {
  DType dtype;
  int64_t rows, top_k, hidden_size, width;
  const Tensor &gate_up, &down;  // stacks
  ExpertGate gate;
  const void *gate_up_bias, *down_bias;  // contiguous, or null
  float alpha, limit;
  bool concatenated;     // of transposed stacks: gate features, then up features, instead of in turn
  const float* weights;  // [rows, top_k]
  const void* residual;  // [rows, hidden_size] contiguous, or null
  void* out;             // [rows, hidden_size]
  const ExpertPairs& pairs;
  const float* x;    // [pairs, x_stride], zeros from hidden_size on
  int64_t x_stride;  // a multiple of 16
  float* spare;      // as many floats as experts_spare or experts_spare_columns said
};

// Arguments of a product of a group's rows, from `x` on, with a matrix of its expert; the output is left
// open.
inline LinearArgs expert_args(const ExpertsCall& call, const ExpertPairs::Group& group, const float* x,
                              int64_t x_stride, const Tensor& stack) {
  LinearArgs args{};
  args.dtype = call.dtype;
  args.rows = group.count;
  args.x = x + group.begin * x_stride;
  args.x_stride = x_stride;
  args.weight = at(stack.const_data_ptr(), group.expert * stack.stride(0), call.dtype);
  args.weight_stride = stack.stride(1);
  args.activation = Activation::kNone;
  return args;
}

// Weights stored [in_features, features], gate and up in turn.
int64_t experts_spare_columns(int64_t pairs, int64_t hidden_size, int64_t width);
void run_experts_columns(const ExpertsCall& call);

}  // namespace hf_fastpath
