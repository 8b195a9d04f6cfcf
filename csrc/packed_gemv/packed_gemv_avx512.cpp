// What: packed_gemv_avx2.cpp with vectors of 16 values, the same bits but for weights in fp8.
//   packed_gemv_block.h has the products.
// Work split: as there.
// Traffic: quants, scales and zeros once.
// Roofline: read bandwidth for one row of x, then instructions: packed_gemv_avx512_vnni.cpp has fewer.
#include "packed_gemv/packed_gemv_avx512.h"

namespace hf_fastpath {

void packed_gemv_avx512(const PackedArgs& args, int64_t begin, int64_t end) {
  range<Avx512>(args, begin, end);
}

}  // namespace hf_fastpath
