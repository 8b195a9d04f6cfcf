// A shared expert beside those that a router chooses: what is checked of it on every device, and its
// products where the experts' kernels do not take it. This header is torch-facing.
#pragma once

#include "common/composed_ops.h"
#include "fused_swiglu/gate.h"

namespace hf_fastpath {

// Weights of a shared expert, or none of them.
struct SharedWeights {
  const std::optional<Tensor>&gate, &up, &down, &logits;

  bool are_there() const { return gate.has_value(); }
};

// Refuses weights that do not go together, or with x; down_weight is that of the other experts.
inline void check_shared(const SharedWeights& shared, const Tensor& x, int64_t rows, const char* op) {
  STD_TORCH_CHECK(shared.gate.has_value() == shared.up.has_value() &&
                      shared.gate.has_value() == shared.down.has_value() &&
                      (shared.gate.has_value() || !shared.logits.has_value()),
                  "hf_fastpath::", op, ": the weights of a shared expert go together");
  if (!shared.are_there()) return;
  const int64_t hidden_size = x.size(x.dim() - 1);
  const auto check = [&](const Tensor& weight, int64_t features, int64_t in_features, const char* name) {
    STD_TORCH_CHECK(weight.dim() == 2 && weight.size(0) == features && weight.size(1) == in_features &&
                        (in_features <= 1 || weight.stride(1) == 1) &&
                        dtype_of(weight, op) == dtype_of(x, op),
                    "hf_fastpath::", op, ": ", name, " has to be [", features, ", ", in_features,
                    "] in x's dtype, with contiguous rows");
  };
  STD_TORCH_CHECK(shared.gate->dim() == 2 && shared.gate->size(0) > 0, "hf_fastpath::", op,
                  ": shared_gate_weight has to be [features, hidden_size]");
  const int64_t width = shared.gate->size(0);
  check(*shared.gate, width, hidden_size, "shared_gate_weight");
  check(*shared.up, width, hidden_size, "shared_up_weight");
  check(*shared.down, hidden_size, width, "shared_down_weight");
  STD_TORCH_CHECK(
      !shared.logits || (shared.logits->numel() == rows && dtype_of(*shared.logits, op) == dtype_of(x, op)),
      "hf_fastpath::", op, ": shared_logits has to be one number a row, in x's dtype");
}

// The sum of what chosen experts give and of what the shared one makes of norm(x).
#define HF_FASTPATH_WITH_SHARED(device)                                                                      \
  inline Tensor with_shared_##device(                                                                        \
      const Tensor& chosen, const SharedWeights& shared, const Tensor& x, int64_t activation, NormKind norm, \
      const std::optional<Tensor>& norm_weight, const std::optional<Tensor>& norm_bias, double norm_eps,     \
      bool programmatic_launch) {                                                                            \
    Tensor hidden =                                                                                          \
        gemv_swiglu_##device(x, *shared.gate, *shared.up, activation, static_cast<int64_t>(norm),            \
                             norm_weight, norm_bias, norm_eps, programmatic_launch, std::nullopt);           \
    if (shared.logits) {                                                                                     \
      std::vector<int64_t> sizes = sizes_of(x);                                                              \
      sizes.back() = 1;                                                                                      \
      const Tensor logits = torch::stable::view(hf_fastpath::contiguous(*shared.logits), sizes);             \
      hidden = fused_swiglu_##device(logits, hidden, static_cast<int64_t>(kSigmoid));                        \
    }                                                                                                        \
    return gemv_##device(hidden, *shared.down, std::nullopt, chosen,                                         \
                         static_cast<int64_t>(Activation::kNone), false,                                     \
                         static_cast<int64_t>(NormKind::kNone), std::nullopt, std::nullopt, 0.0,             \
                         programmatic_launch, std::nullopt);                                                 \
  }

HF_FASTPATH_WITH_SHARED(cpu)
HF_FASTPATH_WITH_SHARED(cuda)

#undef HF_FASTPATH_WITH_SHARED

}  // namespace hf_fastpath
