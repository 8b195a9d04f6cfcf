// What: out[i] = float(x[i]), eight elements a step.
// Work split: one thread; activations of a decode step are a few kilobytes.
// Traffic: count * (element size + 4) bytes, in cache.
// Roofline: latency; a small part of the op it prepares.
#include "common/avx2_math.h"
#include "common/convert_cpu.h"

namespace hf_fastpath {

void convert_to_float_avx2(DType dtype, const void* x, float* out, int64_t count) {
  with_element(dtype, [=](auto element) {
    using Element = decltype(element);
    const auto* from = static_cast<const typename Element::Storage*>(x);
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) _mm256_storeu_ps(out + i, Element::load(from + i));
    if (i < count) F32::store(out + i, Element::load(from + i, count - i), count - i);
  });
}

}  // namespace hf_fastpath
