// What: packed_gemv_avx512.cpp with products and sums of integers in one instruction, of four bits as bytes,
//   which takes half as many to unpack: the same bits.
// Work split: as in packed_gemv_avx2.cpp.
// Traffic: quants, scales and zeros once.
// Roofline: read bandwidth for one row of x, then instructions. Of R as in packed_gemv_avx2.cpp, for one row
//   and four in float16: int8 98 and 86 %, fp8 94 and 59; four bits when they were products of int16, int4 88
//   and 45, int4_g32 91 and 53.
#include "packed_gemv/packed_gemv_avx512.h"

namespace hf_fastpath {
namespace {

struct Avx512Vnni : Avx512 {
  // Quants of four bits as bytes: the lower halves of a block's bytes, and the upper.
  struct Nibbles {
    __m512i lower, upper;
  };
  template <int kBits>
  HF_INLINE auto pieces_of(const uint8_t* quants) {
    if constexpr (kBits == 8) {
      return Avx512::pieces_of<8>(quants);
    } else {
      const __m512i low = _mm512_set1_epi8(15), q = _mm512_loadu_si512(quants);
      return Nibbles{_mm512_and_si512(q, low), _mm512_and_si512(_mm512_srli_epi16(q, 4), low)};
    }
  }
  HF_INLINE Total dot(const Pieces& pieces, const void* steps) {
    Total total = none();
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      total = _mm512_dpwssd_epi32(total, pieces.piece[i],
                                  _mm512_load_si512(static_cast<const __m512i*>(steps) + i));
    }
    return total;
  }
  // Steps are 256 * high + low.
  HF_INLINE Total dot(const Nibbles& quants, const void* steps) {
    const auto* of = static_cast<const __m512i*>(steps);
    const Total high = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(none(), quants.lower, _mm512_load_si512(of)),
                                           quants.upper, _mm512_load_si512(of + 1));
    const Total start = _mm512_slli_epi32(high, 8);
    return _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(start, quants.lower, _mm512_load_si512(of + 2)),
                               quants.upper, _mm512_load_si512(of + 3));
  }
};

}  // namespace

void packed_gemv_avx512_vnni(const PackedArgs& args, int64_t begin, int64_t end) {
  range<Avx512Vnni>(args, begin, end);
}

}  // namespace hf_fastpath
