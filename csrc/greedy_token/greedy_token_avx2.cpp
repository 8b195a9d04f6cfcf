// What: argmax of a row of logits, the first of equals.
// Work split: none.
// Traffic: the row twice, the second time from the second-level cache.
// Roofline: conversion to float32, eight values at a time.
#include "common/avx2_math.h"
#include "greedy_token/greedy_token_cpu.h"

namespace hf_fastpath {
namespace {

template <class Element>
int64_t argmax_of(const typename Element::Storage* values, int64_t count) {
  const __m256 least = _mm256_set1_ps(-__builtin_inff());
  __m256 most = least, odd = _mm256_setzero_ps();
  const auto take = [&](__m256 v) {
    most = _mm256_max_ps(most, v);
    odd = _mm256_or_ps(odd, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  };
  const int64_t rest = count % kLanes, whole = count - rest;
  const __m256 exists = _mm256_castsi256_ps(lane_mask(rest));
  for (int64_t i = 0; i < whole; i += kLanes) take(Element::load(values + i));
  if (rest > 0) take(_mm256_blendv_ps(least, Element::load(values + whole, rest), exists));
  if (_mm256_movemask_ps(odd) != 0) return -1;
  const __m256 top = _mm256_set1_ps(horizontal_max(most));
  for (int64_t i = 0; i < whole; i += kLanes) {
    const int found = _mm256_movemask_ps(_mm256_cmp_ps(Element::load(values + i), top, _CMP_EQ_OQ));
    if (found != 0) return i + __builtin_ctz(static_cast<unsigned>(found));
  }
  const __m256 same = _mm256_cmp_ps(Element::load(values + whole, rest), top, _CMP_EQ_OQ);
  return whole + __builtin_ctz(static_cast<unsigned>(_mm256_movemask_ps(same) & _mm256_movemask_ps(exists)));
}

}  // namespace

int64_t argmax_avx2(DType dtype, const void* values, int64_t count) {
  int64_t index = -1;
  with_element(dtype, [&](auto element) {
    using Element = decltype(element);
    index = argmax_of<Element>(static_cast<const typename Element::Storage*>(values), count);
  });
  return index;
}

}  // namespace hf_fastpath
