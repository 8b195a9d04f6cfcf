// What: scores of a block of positions for the heads of a thread, and the heads' weighted sums of the block's
//   latents, in float32.
// Work split: the glue gives every thread a range of heads, and takes a block of positions through all heads
//   of a thread that belong to one sequence. Two heads at a time meet four positions, or four vectors of a
//   latent: eight sums are in flight, and each value that is loaded is used twice or four times.
// Traffic: the block is in L1 or L2; a thread reads each latent from memory once.
// Roofline: arithmetic: (2 * rank + rope_dim) multiplications a position and head.
#include "common/avx2_math.h"
#include "latent_attention/latent_attention_cpu.h"

namespace hf_fastpath {
namespace {

constexpr int64_t kHeads = 2, kPositions = 4, kVectors = 4;  // at once

HF_INLINE __m256 load_up_to(const float* from, int64_t count) {
  return count >= kLanes ? _mm256_loadu_ps(from) : F32::load(from, count);
}

template <int64_t kOfHeads, int64_t kOfPositions>
HF_INLINE void score(const LatentBlock& block, const float* q, int64_t first, float* scores) {
  const float* keys = block.keys + first * block.width;
  __m256 sums[kOfHeads][kOfPositions];
  for (auto& of_head : sums)
    for (__m256& sum : of_head) sum = _mm256_setzero_ps();
  for (int64_t i = 0; i < block.width; i += kLanes) {
    __m256 x[kOfHeads];
    for (int64_t h = 0; h < kOfHeads; ++h) x[h] = load_up_to(q + h * block.width + i, block.width - i);
    for (int64_t j = 0; j < kOfPositions; ++j) {
      const __m256 key = load_up_to(keys + j * block.width + i, block.width - i);
      for (int64_t h = 0; h < kOfHeads; ++h) sums[h][j] = _mm256_fmadd_ps(x[h], key, sums[h][j]);
    }
  }
  for (int64_t h = 0; h < kOfHeads; ++h)
    for (int64_t j = 0; j < kOfPositions; ++j)
      scores[h * kLatentBlock + first + j] = horizontal_sum(sums[h][j]);
}

template <int64_t kOfHeads>
HF_INLINE void score_all(const LatentBlock& block, const float* q, float* scores) {
  int64_t j = 0;
  for (; j + kPositions <= block.count; j += kPositions) score<kOfHeads, kPositions>(block, q, j, scores);
  for (; j < block.count; ++j) score<kOfHeads, 1>(block, q, j, scores);
}

// The sums of a block start at zero: a sum of few values has a small error.
template <int64_t kOfHeads, int64_t kOfVectors>
HF_INLINE void add(const LatentBlock& block, const float* weights, const float* shrink, int64_t first,
                   float* sums) {
  const int64_t count = block.rank - first;  // beyond kOfVectors * kLanes where all are whole
  __m256 added[kOfHeads][kOfVectors];
  for (auto& of_head : added)
    for (__m256& sum : of_head) sum = _mm256_setzero_ps();
  for (int64_t j = 0; j < block.count; ++j) {
    __m256 latent[kOfVectors];
    for (int64_t v = 0; v < kOfVectors; ++v)
      latent[v] = load_up_to(block.keys + j * block.width + first + v * kLanes, count - v * kLanes);
    for (int64_t h = 0; h < kOfHeads; ++h) {
      const __m256 weight = _mm256_broadcast_ss(weights + h * kLatentBlock + j);
      for (int64_t v = 0; v < kOfVectors; ++v) added[h][v] = _mm256_fmadd_ps(weight, latent[v], added[h][v]);
    }
  }
  for (int64_t h = 0; h < kOfHeads; ++h) {
    const __m256 factor = _mm256_broadcast_ss(shrink + h);
    for (int64_t v = 0; v < kOfVectors; ++v) {
      float* to = sums + h * block.rank + first + v * kLanes;
      const int64_t rest = count - v * kLanes;
      const __m256 sum = _mm256_fmadd_ps(factor, load_up_to(to, rest), added[h][v]);
      if (rest >= kLanes) {
        _mm256_storeu_ps(to, sum);
      } else {
        F32::store(to, sum, rest);
      }
    }
  }
}

template <int64_t kOfHeads>
HF_INLINE void add_all(const LatentBlock& block, const float* weights, const float* shrink, float* sums) {
  int64_t i = 0;
  for (; i + kVectors * kLanes <= block.rank; i += kVectors * kLanes)
    add<kOfHeads, kVectors>(block, weights, shrink, i, sums);
  for (; i < block.rank; i += kLanes) add<kOfHeads, 1>(block, weights, shrink, i, sums);
}

}  // namespace

void latent_scores_avx2(const LatentBlock& block, const float* q, float* scores) {
  int64_t h = 0;
  for (; h + kHeads <= block.heads; h += kHeads)
    score_all<kHeads>(block, q + h * block.width, scores + h * kLatentBlock);
  for (; h < block.heads; ++h) score_all<1>(block, q + h * block.width, scores + h * kLatentBlock);
}

void latent_add_avx2(const LatentBlock& block, const float* weights, const float* shrink, float* sums) {
  int64_t h = 0;
  for (; h + kHeads <= block.heads; h += kHeads)
    add_all<kHeads>(block, weights + h * kLatentBlock, shrink + h, sums + h * block.rank);
  for (; h < block.heads; ++h)
    add_all<1>(block, weights + h * kLatentBlock, shrink + h, sums + h * block.rank);
}

}  // namespace hf_fastpath
