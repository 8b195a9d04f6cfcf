// fake_quantize_row.h in vectors of eight.
#include "fake_quantize/fake_quantize_row.h"

namespace hf_fastpath {

void fake_quantize_avx2(const FakeQuantizeParams& params, int64_t begin, int64_t end, float* row) {
  fake_quantize_rows(params, begin, end, row);
}
void mark_outliers_avx2(const FakeQuantizeParams& params, int64_t begin, int64_t end) {
  mark_columns(params, begin, end);
}

}  // namespace hf_fastpath
