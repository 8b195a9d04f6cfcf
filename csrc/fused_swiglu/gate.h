// What fused_swiglu does to its gates: an activation, or the logistic function, which no other op has.
#pragma once

#include "common/dtype.h"

namespace hf_fastpath {

constexpr Activation kSigmoid{7};  // behind the choices of common/dtype.h

constexpr bool is_gate(Activation activation) {
  return activation == Activation::kSilu || activation == Activation::kGeluTanh ||
         activation == Activation::kGelu || activation == kSigmoid;
}

}  // namespace hf_fastpath
