// What: sum = residual + x, which is kept in float32, and its RMS norm, rounded once.
// Work split: the glue gives every thread a contiguous range of rows; the sum is read again from the
//   first-level cache.
// Traffic: rows * hidden_size * (2 * element size + 8), plus the weight, which stays cached.
// Roofline: read and write bandwidth, as of rms_norm.
#include "add_rms_norm/add_rms_norm_cpu.h"
#include "common/epilogue_avx2.h"

namespace hf_fastpath {
namespace {

constexpr int64_t kChains = 4;  // independent accumulators: an addition has four cycles of latency

template <class Element>
void norm_rows(const AddRmsNormArgs& args, int64_t begin, int64_t end) {
  using Storage = typename Element::Storage;
  const auto* weight = static_cast<const Storage*>(args.weight);
  const int64_t n = args.hidden_size, whole = n / kLanes * kLanes;
  for (int64_t row = begin; row < end; ++row) {
    const auto* x = static_cast<const Storage*>(args.x) + row * n;
    const float* residual = args.residual + row * n;
    float* sum = args.sum + row * n;
    auto* out = static_cast<Storage*>(args.out) + row * n;
    __m256 squares[kChains];
    for (__m256& each : squares) each = _mm256_setzero_ps();
    for (int64_t i = 0; i < whole; i += kLanes) {
      const __m256 v = _mm256_add_ps(_mm256_loadu_ps(residual + i), Element::load(x + i));
      _mm256_storeu_ps(sum + i, v);
      __m256& total = squares[i / kLanes % kChains];
      total = _mm256_fmadd_ps(v, v, total);
    }
    float tail = 0.0f, last[kLanes];
    if (whole < n) {
      _mm256_storeu_ps(last, Element::load(x + whole, n - whole));
      for (int64_t i = whole; i < n; ++i) {
        sum[i] = residual[i] + last[i - whole];
        tail += sum[i] * sum[i];
      }
    }
    const float total = tail + horizontal_sum(_mm256_add_ps(_mm256_add_ps(squares[0], squares[1]),
                                                            _mm256_add_ps(squares[2], squares[3])));
    const float mean = total / static_cast<float>(n);
    const float denominator = _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(mean + static_cast<float>(args.eps))));
    const __m256 scale = _mm256_set1_ps(1.0f / denominator);
    for (int64_t i = 0; i < whole; i += kLanes) {
      const __m256 normed = _mm256_mul_ps(_mm256_loadu_ps(sum + i), scale);
      Element::store(out + i, _mm256_mul_ps(normed, Element::load(weight + i)));
    }
    if (whole < n) {
      for (int64_t i = whole; i < n; ++i) last[i - whole] = sum[i];
      const __m256 normed = _mm256_mul_ps(_mm256_loadu_ps(last), scale);
      Element::store(out + whole, _mm256_mul_ps(normed, Element::load(weight + whole, n - whole)), n - whole);
    }
  }
}

}  // namespace

void add_rms_norm_avx2(const AddRmsNormArgs& args, int64_t begin, int64_t end) {
  with_element(args.dtype, [&](auto element) { norm_rows<decltype(element)>(args, begin, end); });
}

}  // namespace hf_fastpath
