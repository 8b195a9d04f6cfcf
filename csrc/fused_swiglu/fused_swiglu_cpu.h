// Gated activation on the CPU: kernel interface, free of torch.
#pragma once

#include "fused_swiglu/gate.h"

namespace hf_fastpath {

// out[i] = activation(gate[i]) * up[i] for `count` contiguous elements of `dtype`; is_gate(activation). With
// `one_gate` gate[0] is that of all.
void gated_portable(DType dtype, Activation activation, const void* gate, const void* up, void* out,
                    int64_t count, bool one_gate);
void gated_avx2(DType dtype, Activation activation, const void* gate, const void* up, void* out,
                int64_t count, bool one_gate);

}  // namespace hf_fastpath
