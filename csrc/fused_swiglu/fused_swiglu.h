// Torch-free launch of fused_swiglu on a GPU.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "fused_swiglu/gate.h"

namespace hf_fastpath {

// out[r, c] = activation(gate[r, c]) * up[r, c]. gate and up: `rows` rows of `columns` elements, their
// strides in elements; out: contiguous; is_gate(activation). With
// `one_gate` a row's first gate is that of all its columns. No load is
// made before the kernel in front on `stream` is complete, but the next kernel may start at once.
void launch_fused_swiglu(const void* gate, const void* up, void* out, int64_t rows, int64_t columns,
                         int64_t gate_stride, int64_t up_stride, bool one_gate, DType dtype,
                         Activation activation, cudaStream_t stream);

}  // namespace hf_fastpath
