// What: (weight_offset + weight) * x / sqrt(mean(x^2) + eps), statistics and product in float32; plus
// residual, if any. Work split: the glue gives every thread a contiguous range of rows; a row is read twice,
// the second time
//   from the first-level cache.
// Traffic: rows * hidden_size * 2 * element size, plus the weight, which stays cached.
// Roofline: read and write bandwidth; 48 % (bfloat16) to over 100 % of the read bandwidth for 512 x 4096
//   (Xeon 2.8 GHz, 2026-11).
#include "common/epilogue_avx2.h"
#include "rms_norm/rms_norm_cpu.h"
#include "rms_norm/rms_norm_row_avx2.h"

namespace hf_fastpath {
namespace {

// out[0..count) *= factor, of what was rounded already: rounded again.
template <class Element>
void scale_row(const typename Element::Storage* factor, int64_t count, typename Element::Storage* out) {
  const __m256 by = _mm256_set1_ps(_mm256_cvtss_f32(Element::load(factor, 1)));
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) Element::store(out + i, _mm256_mul_ps(Element::load(out + i), by));
  if (i < count) Element::store(out + i, _mm256_mul_ps(Element::load(out + i, count - i), by), count - i);
}

template <class Element>
void norm_rows(const RmsNormArgs& args, int64_t begin, int64_t end) {
  using Storage = typename Element::Storage;
  const auto* weight = static_cast<const Storage*>(args.weight);
  const int64_t n = args.hidden_size;
  for (int64_t row = begin; row < end; ++row) {
    const auto* x = static_cast<const Storage*>(args.x) + row * args.x_stride;
    auto* out = static_cast<Storage*>(args.out) + row * n;
    rms_norm_row<Element, Element>(x, weight, args.weight_offset, args.eps, n, out);
    if (args.residual != nullptr)
      add_row<Element>(static_cast<const Storage*>(args.residual) + row * n, n, out);
    if (args.factor != nullptr) scale_row<Element>(static_cast<const Storage*>(args.factor), n, out);
  }
}

}  // namespace

void rms_norm_avx2(const RmsNormArgs& args, int64_t begin, int64_t end) {
  with_element(args.dtype, [&](auto element) { norm_rows<decltype(element)>(args, begin, end); });
}

}  // namespace hf_fastpath
