// Which kernel a product with a quantized matrix gets: one form of packed_gemv_kernel (packed_gemv_ring.cuh)
// a format.

#include "packed_gemv/packed_gemv.h"

namespace hf_fastpath {

bool fits_packed_gemv(const GemvParams& p) { return p.norm.kind != Norm::kLayer; }

bool fits_packed_append(const GemvParams& p, const RopeAppendParams& rope) {
  constexpr int kMostFloatRows = 4;  // of sixteen columns
  return rope.head_dim % 2 == 0 && !is_quantized(rope.kv_type) &&
         (p.dtype != DType::kFloat32 || p.m <= kMostFloatRows);
}

void launch_packed_gemv(const GemvParams& params, int x_width, const PackedMatrix& matrix,
                        const RopeAppendParams* rope, cudaStream_t stream) {
  if (params.n == 0) return;
  switch (matrix.form) {
    case PackedForm::kInt8:
      return launch_packed_form<PackedForm::kInt8>(params, x_width, matrix, rope, stream);
    case PackedForm::kFp8:
      return launch_packed_form<PackedForm::kFp8>(params, x_width, matrix, rope, stream);
    case PackedForm::kInt4:
      return launch_packed_form<PackedForm::kInt4>(params, x_width, matrix, rope, stream);
    case PackedForm::kInt4G32:
      return launch_packed_form<PackedForm::kInt4G32>(params, x_width, matrix, rope, stream);
  }
}

}  // namespace hf_fastpath
