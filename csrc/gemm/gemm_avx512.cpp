// header
#include <utility>

#include "gemm/gemm_block.h"

namespace hf_fastpath {
namespace {

struct Vector16 {
  using Type = __m512;
  static constexpr int kWidth = 16;
  static constexpr int kRows = 12;  // 24 sums, two vectors of the panel and a broadcast: 27 of 32 registers
  HF_INLINE Type zero() { return _mm512_setzero_ps(); }
  HF_INLINE Type load(const float* from) { return _mm512_load_ps(from); }
  HF_INLINE Type broadcast(const float* from) { return _mm512_set1_ps(*from); }
  HF_INLINE Type add(Type a, Type b) { return _mm512_add_ps(a, b); }
  HF_INLINE Type fma(Type a, Type b, Type c) { return _mm512_fmadd_ps(a, b, c); }
  HF_INLINE void store(float* to, Type value) { _mm512_store_ps(to, value); }
};

}  // namespace

void gemm_strip_avx512(const GemmArgs& args, int64_t row_begin, int64_t row_end, int64_t begin, int64_t end,
                       float* scratch) {
  if (args.dtype == DType::kFloat16)
    return strip<Vector16, F16>(args, row_begin, row_end, begin, end, scratch);
  strip<Vector16, BF16>(args, row_begin, row_end, begin, end, scratch);
}

}  // namespace hf_fastpath
