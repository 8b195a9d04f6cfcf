// packed_gemv with vectors of 16 values; packed_gemv_block.h has the products, packed_gemv_avx2.cpp the
// description.
#include "packed_gemv/packed_gemv_avx512.h"

namespace hf_fastpath {

void packed_gemv_avx512(const PackedArgs& args, int64_t begin, int64_t end) {
  range<Avx512>(args, begin, end);
}

}  // namespace hf_fastpath
