// Which kernel a product with a quantized matrix gets: one variant of packed_gemv_kernel
// (packed_gemv_ring.cuh) a format.

#include "packed_gemv/packed_gemv.h"

namespace hf_fastpath {

bool fits_packed_gemv(const GemvParams& p) { return p.norm.kind != NormKind::kLayer; }

bool fits_packed_append(const GemvParams& p, const RopeAppendParams& rope) {
  constexpr int kMostFloatRows = 4;                                    // of sixteen columns
  const bool turns_neighbors = rope.neighbors && rope.rotary_dim > 0;  // rows_together() needs rows in order
  return rope.head_dim % 2 == 0 && !is_quantized(rope.kv_type) && !turns_neighbors &&
         (p.dtype != DType::kFloat32 || p.m <= kMostFloatRows);
}

int64_t packed_gemv_workspace_bytes(const GemvParams& params, const PackedMatrix& matrix) {
  return with_format(matrix.format, [&](auto format) {
    return packed_format_workspace_bytes<decltype(format)::value>(params, matrix);
  });
}

void launch_packed_gemv(const GemvParams& params, int x_width, const PackedMatrix& matrix,
                        const RopeAppendParams* rope, void* workspace, cudaStream_t stream) {
  if (params.n == 0) return;
  with_format(matrix.format, [&](auto format) {
    launch_packed_format<decltype(format)::value>(params, x_width, matrix, rope, workspace, stream);
  });
}

}  // namespace hf_fastpath
