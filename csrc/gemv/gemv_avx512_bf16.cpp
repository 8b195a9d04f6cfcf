// What: gemv_avx512.cpp's product in bfloat16 by vdpbf16ps, which multiplies 32 pairs as they lie in memory
//   and adds every two of them to a float32 sum. Products are exact; an output's sums differ by float32
//   rounding from those of other kernels, as their order does. Subnormal bfloat16 count as zeros.
// Work split: as in gemv_avx2.cpp, with up to eight rows of x at a time.
// Traffic: the weight once.
// Roofline: read bandwidth for few rows of x, then arithmetic. A step of TinyLlama, two threads, EPYC with
//   two 512-bit vdpbf16ps a cycle, R = 48.5 GB/s, 2026-11, of R: 79 % for two rows, 67 for four, 63 for
//   eight, 44 for sixteen.
#include "common/avx512_math.h"
#include "gemv/gemv_linear.h"

namespace hf_fastpath {
namespace {

struct Pairs32 : Floats16 {
  using Operand = __m512i;
  using Input = uint16_t;
  static constexpr int kWidth = 32;
  static constexpr int kRows = 8;  // of x: 24 sums, three vectors of weights and one of x in 32 registers
  HF_INLINE Operand load(const uint16_t* from) { return _mm512_loadu_si512(from); }
  template <class Element>
  HF_INLINE Operand load(const uint16_t* from) {
    return load(from);
  }
  // The first `count` < kWidth values, zeros behind them.
  template <class Element>
  HF_INLINE Operand load(const uint16_t* from, int64_t count) {
    return _mm512_maskz_loadu_epi16((__mmask32{1} << count) - 1, from);
  }
  HF_INLINE Type fma(Operand a, Operand b, Type c) {
    return _mm512_dpbf16_ps(c, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
};

}  // namespace

void linear_avx512_bf16(const LinearArgs& args, int64_t begin, int64_t end) {
  linear_range_of<Pairs32, BF16>(args, begin, end);
}

}  // namespace hf_fastpath
