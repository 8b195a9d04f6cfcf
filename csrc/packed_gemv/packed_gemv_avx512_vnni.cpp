// What: packed_gemv_avx512.cpp with products and sums of integers in one instruction: the same bits.
// Work split: as in packed_gemv_avx2.cpp.
// Traffic: quants, scales and zeros once.
// Roofline: read bandwidth for one row of x, then instructions. Of R as in packed_gemv_avx2.cpp, for one row
//   and four in float16: int8 98 and 86 %, fp8 94 and 59, int4 88 and 45, int4_g32 91 and 53.
#include "packed_gemv/packed_gemv_avx512.h"

namespace hf_fastpath {
namespace {

struct Avx512Vnni : Avx512 {
  HF_INLINE Total dot(const Pieces& pieces, const void* steps) {
    Total total = none();
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      total = _mm512_dpwssd_epi32(total, pieces.piece[i],
                                  _mm512_load_si512(static_cast<const __m512i*>(steps) + i));
    }
    return total;
  }
};

}  // namespace

void packed_gemv_avx512_vnni(const PackedArgs& args, int64_t begin, int64_t end) {
  range<Avx512Vnni>(args, begin, end);
}

}  // namespace hf_fastpath
