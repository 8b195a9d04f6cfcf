// What follows the accumulators of a projection, and the output of a norm, eight values at a time. Only the
// AVX2 kernels include this header; linkage is internal, as in avx2_math.h.
#pragma once

#include "common/avx2_math.h"

namespace hf_fastpath {
namespace {

// out[0..count) of one row from its accumulators, float32 unless Accumulator says otherwise: bias,
// activation, product with `up`, residual, one rounding. `accumulators` may be `out`.
template <class Element, Activation kActivation, class Accumulator = F32>
void epilogue(const typename Accumulator::Storage* accumulators, const float* up,
              const typename Element::Storage* bias, const typename Element::Storage* residual,
              typename Element::Storage* out, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    __m256 v = Accumulator::load(accumulators + i);
    if (bias != nullptr) v = _mm256_add_ps(v, Element::load(bias + i));
    v = activate_ps<kActivation>(v);
    if (up != nullptr) v = _mm256_mul_ps(v, _mm256_loadu_ps(up + i));
    if (residual != nullptr) v = _mm256_add_ps(v, Element::load(residual + i));
    Element::store(out + i, v);
  }
  if (i < count) {
    const int64_t n = count - i;
    __m256 v = Accumulator::load(accumulators + i, n);
    if (bias != nullptr) v = _mm256_add_ps(v, Element::load(bias + i, n));
    v = activate_ps<kActivation>(v);
    if (up != nullptr) v = _mm256_mul_ps(v, F32::load(up + i, n));
    if (residual != nullptr) v = _mm256_add_ps(v, Element::load(residual + i, n));
    Element::store(out + i, v, n);
  }
}

// out[0..count) += residual, of what was rounded already: rounded again.
template <class Element>
void add_row(const typename Element::Storage* residual, int64_t count, typename Element::Storage* out) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    Element::store(out + i, _mm256_add_ps(Element::load(out + i), Element::load(residual + i)));
  }
  if (i < count) {
    const int64_t n = count - i;
    Element::store(out + i, _mm256_add_ps(Element::load(out + i, n), Element::load(residual + i, n)), n);
  }
}

}  // namespace
}  // namespace hf_fastpath
