// What: weight * norm(x) * activation(gate), or weight * norm(x * activation(gate)), over each group of each
//   row, in float32, rounded once.
// Work split: the glue gives every thread a range of groups. The product of x and activated gate is the same
//   in both orders; only the sum of squares differs: the first pass keeps products in a buffer, the second
//   scales them.
// Traffic: rows * hidden_size * 3 * element size; the buffer and the weight stay in the first-level cache.
// Roofline: arithmetic: one exp and one division an element.
#include "common/avx2_math.h"
#include "gated_rms_norm/gated_rms_norm_cpu.h"

namespace hf_fastpath {
namespace {

constexpr int64_t kSummed = 512;  // elements whose squares are added up in float32: their errors stay small

template <class Element>
void norm_groups(const GatedRmsNormParams& p, int64_t begin, int64_t end, float* products) {
  using Storage = typename Element::Storage;
  const int64_t n = p.hidden_size / p.groups;
  for (int64_t group = begin; group < end; ++group) {
    const int64_t row = group / p.groups, first = group % p.groups * n;
    const auto* x = static_cast<const Storage*>(p.x) + row * p.x_stride + first;
    const auto* gate = static_cast<const Storage*>(p.gate) + row * p.gate_stride + first;
    const auto* weight = static_cast<const Storage*>(p.weight) + first;
    auto* out = static_cast<Storage*>(p.out) + row * p.hidden_size + first;
    // The square of what is normed, behind storing the product.
    const auto first_pass = [&](__m256 value, __m256 z, float* to, int64_t count) {
      const __m256 product =
          p.activation == GateActivation::kSilu ? _mm256_mul_ps(value, silu_ps(z)) : times_sigmoid(value, z);
      F32::store(to, product, count);
      const __m256 normed = p.gate_first ? product : value;
      return _mm256_mul_ps(normed, normed);
    };
    double total = 0.0;
    int64_t i = 0;
    while (i + kLanes <= n) {
      __m256 squares = _mm256_setzero_ps();
      for (const int64_t stop = min_of(n, i + kSummed); i + kLanes <= stop; i += kLanes) {
        squares = _mm256_add_ps(
            squares, first_pass(Element::load(x + i), Element::load(gate + i), products + i, kLanes));
      }
      total += horizontal_sum(squares);
    }
    if (i < n) {
      const int64_t rest = n - i;
      total += horizontal_sum(
          first_pass(Element::load(x + i, rest), Element::load(gate + i, rest), products + i, rest));
    }
    const float mean = static_cast<float>(total / static_cast<double>(n));
    const __m256 scale = _mm256_set1_ps(1.0f / _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(mean + p.eps))));
    for (i = 0; i + kLanes <= n; i += kLanes) {
      const __m256 normed = _mm256_mul_ps(_mm256_loadu_ps(products + i), scale);
      Element::store(out + i, _mm256_mul_ps(normed, Element::load(weight + i)));
    }
    if (i < n) {
      const __m256 normed = _mm256_mul_ps(F32::load(products + i, n - i), scale);
      Element::store(out + i, _mm256_mul_ps(normed, Element::load(weight + i, n - i)), n - i);
    }
  }
}

}  // namespace

void gated_rms_norm_avx2(const GatedRmsNormParams& p, int64_t begin, int64_t end, float* products) {
  with_element(p.dtype, [&](auto element) { norm_groups<decltype(element)>(p, begin, end, products); });
}

}  // namespace hf_fastpath
