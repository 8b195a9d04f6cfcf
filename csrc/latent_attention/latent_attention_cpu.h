// Attention over latents on the CPU: kernel interface, free of torch.
#pragma once

#include <cstdint>

namespace hf_fastpath {

// Positions at once: in float32 they stay in the caches while all heads of a thread meet them.
constexpr int64_t kLatentBlock = 16;

// `count` positions, up to kLatentBlock: rows of a latent and a rotated key in float32, `width` elements
// apart; and the heads that meet them.
struct LatentBlock {
  const float* keys;
  int64_t count, rank, width, heads;
};

// scores[h, j] = q[h] . keys[j] over all of a row. q: [heads, width], scores: [heads, kLatentBlock].
void latent_scores_portable(const LatentBlock& block, const float* q, float* scores);
void latent_scores_avx2(const LatentBlock& block, const float* q, float* scores);

// sums[h] = shrink[h] * sums[h] + the latents, each times its weight. weights: [heads, kLatentBlock], sums:
// [heads, rank].
void latent_add_portable(const LatentBlock& block, const float* weights, const float* shrink, float* sums);
void latent_add_avx2(const LatentBlock& block, const float* weights, const float* shrink, float* sums);

}  // namespace hf_fastpath
