// What: packed_gemv_avx512.cpp with products and sums of integers in one instruction: the same bits.
// Work split: as in packed_gemv_avx2.cpp.
// Traffic: quants, scales and zeros once.
// Roofline: read bandwidth for one row of x, then instructions. All matrices of TinyLlama one after the
//   other, two threads, Xeon with AMX, 2026-11, of a plain read of the same memory, for 1, 2, 4 and 8 rows
//   in float16: int8 78, 73, 66, 37 %; fp8 72, 66, 49, 25 %; int4 65, 55, 35, 19 %; int4_g32 70, 76, 40, 22
//   %. Speed of this shared machine varies by a tenth from run to run.
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
