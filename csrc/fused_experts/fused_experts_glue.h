// What the glue of fused_experts checks on every device. This header is torch-facing.
#pragma once

#include "common/torch_glue.h"

namespace hf_fastpath {

// The gate: one of the activations, or the clamped one; or none.
struct ExpertGate {
  Activation activation;  // kNone if clamped, kRelu if none
  bool clamped;           // (clamp(up) + 1) * gate * sigmoid(alpha * gate), gate clamped too
  bool is_up;             // relu(up) * up: experts have no gate, and up takes its place

  int64_t matrices() const { return is_up ? 1 : 2; }
};

inline ExpertGate expert_gate(int64_t number, bool transposed) {
  if (number == kClampedSwiglu) {
    STD_TORCH_CHECK(transposed, "hf_fastpath::fused_experts: clamped_swiglu goes with transposed");
    return {Activation::kNone, true, false};
  }
  if (number == kSquaredRelu) {
    STD_TORCH_CHECK(!transposed, "hf_fastpath::fused_experts: squared_relu does not go with transposed");
    return {Activation::kRelu, false, true};
  }
  const Activation activation = activation_of(number, "fused_experts");
  STD_TORCH_CHECK(activation != Activation::kNone && activation != Activation::kRelu,
                  "hf_fastpath::fused_experts: the activation is not that of a gate");
  return {activation, false, false};
}

// Refuses weights of all experts that are not [num_experts, features, in_features], or transposed.
inline void check_stack(const Tensor& stack, DType dtype, int64_t num_experts, int64_t features,
                        int64_t in_features, bool transposed, const char* name) {
  STD_TORCH_CHECK(dtype_of(stack, "fused_experts") == dtype, "hf_fastpath::fused_experts: ", name,
                  " differs from x in dtype: cast one");
  STD_TORCH_CHECK(stack.dim() == 3 && stack.size(0) == num_experts &&
                      stack.size(transposed ? 2 : 1) == features &&
                      stack.size(transposed ? 1 : 2) == in_features,
                  "hf_fastpath::fused_experts: ", name, " does not match x and the other weight in shape");
  STD_TORCH_CHECK(stack.size(2) <= 1 || stack.stride(2) == 1, "hf_fastpath::fused_experts: ", name,
                  " has strided rows: make them contiguous");
}

// Refuses a bias that is not [num_experts, features].
inline void check_stack_bias(const std::optional<Tensor>& bias, DType dtype, int64_t num_experts,
                             int64_t features, bool transposed, const char* name) {
  if (!bias) return;
  STD_TORCH_CHECK(transposed, "hf_fastpath::fused_experts: ", name, " goes with transposed");
  STD_TORCH_CHECK(dtype_of(*bias, "fused_experts") == dtype && bias->dim() == 2 &&
                      bias->size(0) == num_experts && bias->size(1) == features,
                  "hf_fastpath::fused_experts: ", name, " has to be [experts, features] in x's dtype");
}

}  // namespace hf_fastpath
