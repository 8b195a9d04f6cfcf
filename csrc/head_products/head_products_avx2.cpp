// What: the product of one row with a head's matrix, in float32.
// Work split: the glue gives every thread a range of outputs. Rows of inputs: a dot product for each output.
//   Rows of outputs: four vectors of sums stay in registers while all inputs go by.
// Traffic: the weight, once.
// Roofline: memory bandwidth for weights that come from memory.
#include "common/avx2_math.h"
#include "head_products/head_products_cpu.h"

namespace hf_fastpath {
namespace {

constexpr int64_t kVectors = 4;  // of sums at once

template <class Element>
HF_INLINE __m256 load_up_to(const typename Element::Storage* from, int64_t count) {
  return count >= kLanes ? Element::load(from) : Element::load(from, count);
}

template <class Element>
float dot(const typename Element::Storage* row, const float* x, int64_t count) {
  __m256 sums[kVectors];
  for (__m256& sum : sums) sum = _mm256_setzero_ps();
  int64_t i = 0;
  for (; i + kVectors * kLanes <= count; i += kVectors * kLanes) {
    for (int64_t v = 0; v < kVectors; ++v)
      sums[v] =
          _mm256_fmadd_ps(Element::load(row + i + v * kLanes), _mm256_loadu_ps(x + i + v * kLanes), sums[v]);
  }
  for (; i < count; i += kLanes)
    sums[0] =
        _mm256_fmadd_ps(load_up_to<Element>(row + i, count - i), load_up_to<F32>(x + i, count - i), sums[0]);
  return horizontal_sum(_mm256_add_ps(_mm256_add_ps(sums[0], sums[1]), _mm256_add_ps(sums[2], sums[3])));
}

// kOfVectors vectors of outputs from `weight` on, `count` outputs at most.
template <class Element, int64_t kOfVectors>
HF_INLINE void add_rows(const HeadProductsParams& p, const typename Element::Storage* weight, const float* x,
                        int64_t count, float* sums) {
  __m256 added[kOfVectors];
  for (__m256& sum : added) sum = _mm256_setzero_ps();
  for (int64_t i = 0; i < p.inputs; ++i) {
    const __m256 factor = _mm256_broadcast_ss(x + i);
    for (int64_t v = 0; v < kOfVectors; ++v) {
      const auto* from = weight + i * p.weight_row_stride + v * kLanes;
      added[v] = _mm256_fmadd_ps(factor, load_up_to<Element>(from, count - v * kLanes), added[v]);
    }
  }
  for (int64_t v = 0; v < kOfVectors; ++v)
    F32::store(sums + v * kLanes, added[v], min_of(kLanes, count - v * kLanes));
}

}  // namespace

void head_product_avx2(const HeadProductsParams& p, const void* weight, const float* x, int64_t begin,
                       int64_t end, float* sums) {
  with_element(p.dtype, [&](auto element) {
    using Element = decltype(element);
    const auto* values = static_cast<const typename Element::Storage*>(weight);
    if (!p.transposed) {
      for (int64_t o = begin; o < end; ++o)
        sums[o] = dot<Element>(values + o * p.weight_row_stride, x, p.inputs);
      return;
    }
    int64_t o = begin;
    for (; o + kVectors * kLanes <= end; o += kVectors * kLanes)
      add_rows<Element, kVectors>(p, values + o, x, end - o, sums + o);
    for (; o < end; o += kLanes) add_rows<Element, 1>(p, values + o, x, end - o, sums + o);
  });
}

}  // namespace hf_fastpath
