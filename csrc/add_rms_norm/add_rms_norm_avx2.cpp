// What: sum = residual + x, which is kept in float32, and its RMS norm, rounded once.
// Work split: the glue gives every thread a contiguous range of rows; the sum is read again from the
//   first-level cache.
// Traffic: rows * hidden_size * (2 * element size + 8), plus the weight, which stays cached.
// Roofline: read and write bandwidth, as of rms_norm.
#include "add_rms_norm/add_rms_norm_cpu.h"
#include "rms_norm/rms_norm_row_avx2.h"

namespace hf_fastpath {
namespace {

template <class Element>
void norm_rows(const AddRmsNormArgs& args, int64_t begin, int64_t end) {
  using Storage = typename Element::Storage;
  const auto* weight = static_cast<const Storage*>(args.weight);
  const int64_t n = args.hidden_size;
  for (int64_t row = begin; row < end; ++row) {
    const auto* x = static_cast<const Storage*>(args.x) + row * n;
    const float* residual = args.residual + row * n;
    float* sum = args.sum + row * n;
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
      F32::store(sum + i, _mm256_add_ps(F32::load(residual + i), Element::load(x + i)));
    if (i < n)
      F32::store(sum + i, _mm256_add_ps(F32::load(residual + i, n - i), Element::load(x + i, n - i)), n - i);
    rms_norm_row<F32, Element>(sum, weight, 0.0f, args.eps, n, static_cast<Storage*>(args.out) + row * n);
  }
}

}  // namespace

void add_rms_norm_avx2(const AddRmsNormArgs& args, int64_t begin, int64_t end) {
  with_element(args.dtype, [&](auto element) { norm_rows<decltype(element)>(args, begin, end); });
}

}  // namespace hf_fastpath
