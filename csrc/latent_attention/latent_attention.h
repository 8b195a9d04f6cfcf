// Torch-free launch of attention over latents on a GPU.
#pragma once

#include <cuda_runtime.h>

#include "latent_attention/latent_attention_params.h"

namespace hf_fastpath {

// A call, and memory for what blocks found that a head's positions are split over.
struct LatentSplits {
  LatentAttentionParams p;
  int splits;
  float* outputs;    // [batch, heads, splits, rank], weighted by 2^(score - max)
  float2* max_sums;  // [batch, heads, splits], max of the scores and sum of these weights
};

// Whether the kernel of tensor cores takes a call: sizes of published models, in 16 bits, at whole accesses.
bool uses_latent_mma(const LatentAttentionParams& p);
// Blocks that a head's positions are split over.
int latent_splits(const LatentAttentionParams& p);
// Bytes for `outputs` and `max_sums`.
int64_t latent_workspace_bytes(const LatentAttentionParams& p);

void launch_latent_attention(const LatentAttentionParams& p, void* workspace, cudaStream_t stream);
void launch_latent_mma(const LatentSplits& s, cudaStream_t stream);

}  // namespace hf_fastpath
