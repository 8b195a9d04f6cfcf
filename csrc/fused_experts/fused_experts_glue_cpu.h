// What the two variants of fused_experts share on the CPU. This header is torch-facing, and *_cpu.cpp alone
// include it.
#pragma once

#include <vector>

#include "fused_experts/fused_experts_glue.h"
#include "gemv/gemv_glue_cpu.h"

namespace hf_fastpath {

// The pairs of a row and a choice, sorted by expert: those of one expert lie side by side.
struct ExpertPairs {
  struct Group {
    int64_t expert, begin, count;  // places of its pairs; at most as many as a kernel takes rows
  };
  std::vector<Group> groups;
  std::vector<int64_t> place;  // of pair row * top_k + k; -1 without an expert
  std::vector<int64_t> row;    // of x, by place

  int64_t count() const { return static_cast<int64_t>(row.size()); }
};

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

// Outputs that are summed at once, on the stack.
constexpr int64_t kExpertChunk = 256;

// Weighs and adds what a row's experts give for outputs [begin, end), in the order of its choices, whatever
// other rows chose; and the residual. read(place, first, n, to) gives n outputs of a pair.
template <class Read>
void add_choices(const ExpertsCall& call, int64_t begin, int64_t end, const Read& read) {
  const auto convert = use_avx2() ? convert_to_float_avx2 : convert_to_float_portable;
  for (int64_t row = 0; row < call.rows; ++row) {
    for (int64_t first = begin; first < end; first += kExpertChunk) {
      const int64_t n = std::min(kExpertChunk, end - first);
      double accumulators[kExpertChunk] = {};  // of up to 32 choices, whose roundings would add up
      float one[kExpertChunk];
      for (int64_t pair = row * call.top_k; pair < (row + 1) * call.top_k; ++pair) {
        if (call.pairs.place[pair] < 0) continue;
        read(call.pairs.place[pair], first, n, one);
        for (int64_t i = 0; i < n; ++i) accumulators[i] += double(call.weights[pair]) * one[i];
      }
      if (call.residual != nullptr) {
        convert(call.dtype, at(call.residual, row * call.hidden_size + first, call.dtype), one, n);
        for (int64_t i = 0; i < n; ++i) accumulators[i] += one[i];
      }
      with_storage(call.dtype, [&](auto* tag) {
        using T = std::remove_pointer_t<decltype(tag)>;
        T* values = static_cast<T*>(call.out) + row * call.hidden_size + first;
        for (int64_t i = 0; i < n; ++i) from_float(static_cast<float>(accumulators[i]), values + i);
      });
    }
  }
}

// Weights stored [in_features, features], gate and up in turn.
int64_t experts_spare_columns(int64_t pairs, int64_t hidden_size, int64_t width);
void run_experts_columns(const ExpertsCall& call);

}  // namespace hf_fastpath
