// What: out = quant * scale, where quants are x / scale in float8_e4m3fn or in whole numbers. Every operation
// is
//   float32's own, so that quants are those of any other code that computes the same.
// Work split: a thread has whole rows, each in float32 in the first-level cache.
// Traffic: x and out once. Roofline: instructions, some fifteen for eight inputs and a division; the inputs
// of a
//   token are a thousandth of the weights they meet.
#include "fake_quantize/fake_quantize_row.h"

namespace hf_fastpath {

void fake_quantize_avx2(const FakeQuantizeParams& params, int64_t begin, int64_t end, float* row) {
  fake_quantize_rows(params, begin, end, row);
}
void mark_outliers_avx2(const FakeQuantizeParams& params, int64_t begin, int64_t end) {
  mark_columns(params, begin, end);
}

}  // namespace hf_fastpath
