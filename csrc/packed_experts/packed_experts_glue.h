// What the glue of packed_experts checks on every device. This header is torch-facing.
#pragma once

#include "common/composed_ops.h"
#include "weights/packed_weight_glue.h"

namespace hf_fastpath {

// Most choices of a row.
constexpr int64_t kMostPackedChoices = 32;

// The gate of experts: one of the activations, or the clamped one.
struct PackedGate {
  Activation activation;  // kNone if clamped
  bool clamped;           // (clamp(up) + 1) * gate * sigmoid(alpha * gate), gate clamped too
  bool alternating;       // features of gate and up take turns; else those of gate come first
  float alpha, limit;
};

inline PackedGate packed_gate(int64_t number, bool alternating, double alpha, double limit) {
  PackedGate gate{Activation::kNone, number == kClampedSwiglu, alternating, static_cast<float>(alpha),
                  static_cast<float>(limit)};
  if (gate.clamped) return gate;
  gate.activation = activation_of(number, "packed_experts");
  STD_TORCH_CHECK(gate.activation != Activation::kNone && gate.activation != Activation::kRelu,
                  "hf_fastpath::packed_experts: the activation is not that of a gate");
  return gate;
}

// Refuses a bias that is not [num_experts, features].
inline void check_packed_bias(const std::optional<Tensor>& bias, const Tensor& x, int64_t num_experts,
                              int64_t features, const char* name) {
  STD_TORCH_CHECK(!bias || (dtype_of(*bias, "packed_experts") == dtype_of(x, "packed_experts") &&
                            bias->dim() == 2 && bias->size(0) == num_experts && bias->size(1) == features),
                  "hf_fastpath::packed_experts: ", name, " has to be [", num_experts, ", ", features,
                  "] in x's dtype");
}

// Sizes of a call. The matrices of all experts are one, whose rows follow each other.
struct PackedExpertsShape {
  int64_t rows, top_k, hidden_size, width, num_experts;
};

// Refuses tensors that do not fit together; check_packed() looks at the matrices' own.
inline PackedExpertsShape packed_experts_shape(const Tensor& x, const Tensor& ids, const Tensor& weights,
                                               const Tensor& gate_up_quants, const Tensor& down_quants,
                                               const std::optional<Tensor>& gate_up_bias,
                                               const std::optional<Tensor>& down_bias,
                                               const std::optional<Tensor>& residual) {
  constexpr const char* kOp = "hf_fastpath::packed_experts: ";
  STD_TORCH_CHECK(x.dim() >= 1 && x.numel() > 0, kOp, "x is empty");
  STD_TORCH_CHECK(ids.scalar_type() == ScalarType::Long && ids.dim() == 2, kOp,
                  "expert_ids has to be int64 [rows, top_k]");
  STD_TORCH_CHECK(weights.scalar_type() == ScalarType::Float && sizes_of(weights) == sizes_of(ids), kOp,
                  "expert_weights has to be float32 of expert_ids' shape");
  PackedExpertsShape shape{};
  shape.hidden_size = x.size(x.dim() - 1), shape.rows = x.numel() / shape.hidden_size;
  shape.top_k = ids.size(1);
  STD_TORCH_CHECK(ids.size(0) == shape.rows && shape.top_k >= 1 && shape.top_k <= kMostPackedChoices, kOp,
                  "expert_ids has to be [", shape.rows, ", 1 to ", kMostPackedChoices, "]");
  STD_TORCH_CHECK(gate_up_quants.dim() == 2 && down_quants.dim() == 2 && down_quants.size(0) > 0 &&
                      down_quants.size(0) % shape.hidden_size == 0,
                  kOp, "down has to have ", shape.hidden_size, " rows for each expert");
  shape.num_experts = down_quants.size(0) / shape.hidden_size;
  shape.width = gate_up_quants.size(0) / (2 * shape.num_experts);
  STD_TORCH_CHECK(shape.width > 0 && gate_up_quants.size(0) == 2 * shape.width * shape.num_experts, kOp,
                  "gate_up has to have an even number of rows for each of ", shape.num_experts, " experts");
  check_packed_bias(gate_up_bias, x, shape.num_experts, 2 * shape.width, "gate_up_bias");
  check_packed_bias(down_bias, x, shape.num_experts, shape.hidden_size, "down_bias");
  check_residual(x, residual, "packed_experts");
  return shape;
}

}  // namespace hf_fastpath
