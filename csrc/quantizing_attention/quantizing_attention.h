// Torch-free launch of quantizing_attention on a GPU.
// Experiments: docs/lab/decode_attention.md
#pragma once

#include <cuda_runtime.h>

#include "decode_attention/decode_attention.h"

namespace hf_fastpath {

// `params` has quantized caches, new_k and new_v. One kernel where decode_attention_quants.cuh takes the
// shape, else one that quantizes, in front of decode_attention's.
void launch_quantizing_attention(const DecodeAttentionParams& params, cudaStream_t stream);

}  // namespace hf_fastpath
