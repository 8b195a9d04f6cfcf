// packed_gemv_avx512.cpp with products and sums of integers in one instruction: the same bits.
#include "packed_gemv/packed_gemv_avx512.h"

namespace hf_fastpath {
namespace {

struct Avx512Vnni : Avx512 {
  HF_INLINE Total dot(Total total, const Pieces& pieces, const int16_t* steps) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      total = _mm512_dpwssd_epi32(total, pieces.piece[i], _mm512_load_si512(steps + 32 * i));
    }
    return total;
  }
};

}  // namespace

void packed_gemv_avx512_vnni(const PackedArgs& args, int64_t begin, int64_t end) {
  range<Avx512Vnni>(args, begin, end);
}

}  // namespace hf_fastpath
