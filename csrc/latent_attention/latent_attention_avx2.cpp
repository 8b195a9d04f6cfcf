// What: scores of a block of positions for one head, and the head's weighted sum of their latents, in
// float32. Work split: the glue gives every thread a range of heads, and takes a block of positions through
// all heads of
//   a thread that belong to one sequence. Four positions at a time meet a query; sums are loaded and stored
//   once a block.
// Traffic: the block is in L1 or L2; a thread reads each latent from memory once.
// Roofline: arithmetic: (2 * rank + rope_dim) multiplications a position and head.
#include "common/avx2_math.h"
#include "latent_attention/latent_attention_cpu.h"

namespace hf_fastpath {
namespace {

constexpr int64_t kAtOnce = 4;  // positions: accumulators in flight

template <int64_t kCount>
HF_INLINE void score(const LatentBlock& block, const float* q, int64_t first, float* scores) {
  const float* keys = block.keys + first * block.width;
  __m256 sums[kCount];
  for (__m256& sum : sums) sum = _mm256_setzero_ps();
  int64_t i = 0;
  for (; i + kLanes <= block.width; i += kLanes) {
    const __m256 x = _mm256_loadu_ps(q + i);
    for (int64_t j = 0; j < kCount; ++j)
      sums[j] = _mm256_fmadd_ps(x, _mm256_loadu_ps(keys + j * block.width + i), sums[j]);
  }
  if (i < block.width) {
    const int64_t rest = block.width - i;
    const __m256 x = F32::load(q + i, rest);
    for (int64_t j = 0; j < kCount; ++j)
      sums[j] = _mm256_fmadd_ps(x, F32::load(keys + j * block.width + i, rest), sums[j]);
  }
  for (int64_t j = 0; j < kCount; ++j) scores[first + j] = horizontal_sum(sums[j]);
}

}  // namespace

void latent_scores_avx2(const LatentBlock& block, const float* q, float* scores) {
  int64_t j = 0;
  for (; j + kAtOnce <= block.count; j += kAtOnce) score<kAtOnce>(block, q, j, scores);
  for (; j < block.count; ++j) score<1>(block, q, j, scores);
}

void latent_add_avx2(const LatentBlock& block, const float* weights, float shrink, float* sums) {
  const __m256 factor = _mm256_set1_ps(shrink);
  for (int64_t i = 0; i < block.rank; i += kLanes) {
    const int64_t count = min_of(kLanes, block.rank - i);
    const auto load = [=](const float* from) {
      return count == kLanes ? _mm256_loadu_ps(from) : F32::load(from, count);
    };
    __m256 sum = _mm256_setzero_ps();  // of the block alone: a sum of few values has a small error
    for (int64_t j = 0; j < block.count; ++j)
      sum = _mm256_fmadd_ps(_mm256_broadcast_ss(weights + j), load(block.keys + j * block.width + i), sum);
    sum = _mm256_fmadd_ps(factor, load(sums + i), sum);
    if (count == kLanes) {
      _mm256_storeu_ps(sums + i, sum);
    } else {
      F32::store(sums + i, sum, count);
    }
  }
}

}  // namespace hf_fastpath
