// The choice of a gate, on every device. This header is torch-facing.
#pragma once

#include "common/torch_glue.h"
#include "fused_swiglu/gate.h"

namespace hf_fastpath {

inline Activation gate_of(int64_t number) {
  const Activation gate = choice_of(number, kSigmoid, "fused_swiglu", "activation");
  STD_TORCH_CHECK(is_gate(gate), "hf_fastpath::fused_swiglu: activation is ", number,
                  ", expected silu, gelu_tanh, gelu or sigmoid");
  return gate;
}

// Whether `gate` has one gate for a row of `up`; otherwise the two are of one shape.
inline bool has_one_gate(const Tensor& gate, const Tensor& up) {
  const std::vector<int64_t> sizes = sizes_of(up);
  if (sizes_of(gate) == sizes) return false;
  STD_TORCH_CHECK(!sizes.empty() && sizes_of(gate) == sizes_with_last(up, 1),
                  "hf_fastpath::fused_swiglu: gate has to be of up's shape, or have one element for a row");
  return true;
}

}  // namespace hf_fastpath
