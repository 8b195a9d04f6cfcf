// What: the product of one row with a head's matrix, in float32.
// Work split: the glue gives every thread a range of outputs. If a matrix has rows of inputs, an output is a
//   dot product; if it has rows of outputs, eight rows at once are added to sums in the first-level cache.
// Traffic: the weight, once.
// Roofline: memory bandwidth for weights that come from memory.
#include "common/avx2_math.h"
#include "head_products/head_products_cpu.h"

namespace hf_fastpath {
namespace {

constexpr int64_t kVectors = 4;  // of sums of a dot product
constexpr int64_t kRows = 8;     // of outputs at once

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

// Adds kCount rows of outputs from row `first` on to `count` sums. What is added is a sum of so many
// products, which keeps rounding errors small.
template <class Element, int64_t kCount>
HF_INLINE void add_rows(const HeadProductsParams& p, const typename Element::Storage* weight, const float* x,
                        int64_t first, int64_t count, float* sums) {
  const auto* rows = weight + first * p.weight_row_stride;
  for (int64_t o = 0; o < count; o += kLanes) {
    __m256 added = _mm256_setzero_ps();
    for (int64_t r = 0; r < kCount; ++r) {
      const __m256 values = load_up_to<Element>(rows + r * p.weight_row_stride + o, count - o);
      added = _mm256_fmadd_ps(_mm256_broadcast_ss(x + first + r), values, added);
    }
    const __m256 sum = _mm256_add_ps(load_up_to<F32>(sums + o, count - o), added);
    if (count - o >= kLanes) {
      _mm256_storeu_ps(sums + o, sum);
    } else {
      F32::store(sums + o, sum, count - o);
    }
  }
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
    for (int64_t o = begin; o < end; ++o) sums[o] = 0.0f;
    int64_t i = 0;
    for (; i + kRows <= p.inputs; i += kRows)
      add_rows<Element, kRows>(p, values + begin, x, i, end - begin, sums + begin);
    for (; i < p.inputs; ++i) add_rows<Element, 1>(p, values + begin, x, i, end - begin, sums + begin);
  });
}

}  // namespace hf_fastpath
