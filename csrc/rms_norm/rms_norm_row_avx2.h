// The RMS norm of a row, eight values at a time. Only the AVX2 kernels include this header; linkage is
// internal, as in avx2_math.h.
#pragma once

#include "common/avx2_math.h"

namespace hf_fastpath {
namespace {

constexpr int64_t kChains = 4;  // independent accumulators: an addition has four cycles of latency

template <class Element>
float sum_of_squares(const typename Element::Storage* x, int64_t n) {
  __m256 accumulators[kChains];
  for (__m256& sum : accumulators) sum = _mm256_setzero_ps();
  int64_t i = 0;
  for (; i + kChains * kLanes <= n; i += kChains * kLanes) {
    for (int64_t c = 0; c < kChains; ++c) {
      const __m256 v = Element::load(x + i + c * kLanes);
      accumulators[c] = _mm256_fmadd_ps(v, v, accumulators[c]);
    }
  }
  for (; i + kLanes <= n; i += kLanes) {
    const __m256 v = Element::load(x + i);
    accumulators[0] = _mm256_fmadd_ps(v, v, accumulators[0]);
  }
  if (i < n) {
    const __m256 v = Element::load(x + i, n - i);
    accumulators[1] = _mm256_fmadd_ps(v, v, accumulators[1]);
  }
  return horizontal_sum(_mm256_add_ps(_mm256_add_ps(accumulators[0], accumulators[1]),
                                      _mm256_add_ps(accumulators[2], accumulators[3])));
}

// out = (weight_offset + weight) * x / sqrt(mean(x^2) + eps) over n elements, rounded once; weight may be
// null: then nothing multiplies.
template <class In, class Element>
void rms_norm_row(const typename In::Storage* x, const typename Element::Storage* weight, float weight_offset,
                  double eps, int64_t n, typename Element::Storage* out) {
  const float mean = sum_of_squares<In>(x, n) / static_cast<float>(n);
  const float denominator = _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(mean + static_cast<float>(eps))));
  const __m256 scale = _mm256_set1_ps(1.0f / denominator);
  const __m256 offset = _mm256_set1_ps(weight == nullptr ? 1.0f : weight_offset);
  const __m256 zero = _mm256_setzero_ps();
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const __m256 normed = _mm256_mul_ps(In::load(x + i), scale);
    const __m256 more = weight == nullptr ? zero : Element::load(weight + i);
    Element::store(out + i, _mm256_mul_ps(normed, _mm256_add_ps(more, offset)));
  }
  if (i < n) {
    const __m256 normed = _mm256_mul_ps(In::load(x + i, n - i), scale);
    const __m256 more = weight == nullptr ? zero : Element::load(weight + i, n - i);
    Element::store(out + i, _mm256_mul_ps(normed, _mm256_add_ps(more, offset)), n - i);
  }
}

}  // namespace
}  // namespace hf_fastpath
