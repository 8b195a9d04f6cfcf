// The choice of a gate, on every device. Torch-facing.
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

}  // namespace hf_fastpath
