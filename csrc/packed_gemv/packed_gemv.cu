// Which kernel a product with a quantized matrix gets: one variant of packed_gemv_kernel
// (packed_gemv_ring.cuh) a format, or of a format without kernels one of gemv's over the dequantized matrix.

#include "packed_gemv/packed_gemv.h"

namespace hf_fastpath {
namespace {

// The product over `weight`, the matrix as floats.
GemvParams of_floats(const GemvParams& p, const void* weight) {
  GemvParams dense = p;
  const int64_t k = p.k, bytes = p.n * k * element_size(p.dtype);
  dense.segments[0] = {weight, p.segments[0].bias, static_cast<int>(k), 0};
  if (p.gated) {
    dense.segments[1] = {static_cast<const char*>(weight) + bytes, nullptr, static_cast<int>(k), p.n};
    dense.num_segments = 2;
  }
  dense.programmatic_launch = false;  // the weight is what the kernel in front writes
  return dense;
}

}  // namespace

bool fits_packed_gemv(const GemvParams& p, const PackedMatrix& matrix) {
  if (has_kernels(matrix.format)) return p.norm.kind != NormKind::kLayer;
  return fits_one_kernel(of_floats(p, nullptr), nullptr);  // workspaces are aligned as this pointer is
}

bool fits_packed_append(const GemvParams& p, const PackedMatrix& matrix, const RopeAppendParams& rope) {
  constexpr int kMostFloatRows = 4;                                    // of sixteen columns
  const bool turns_neighbors = rope.neighbors && rope.rotary_dim > 0;  // rows_together() needs rows in order
  return has_kernels(matrix.format) && rope.head_dim % 2 == 0 && !is_quantized(rope.kv_type) &&
         !turns_neighbors && (p.dtype != DType::kFloat32 || p.m <= kMostFloatRows);
}

int64_t packed_gemv_workspace_bytes(const GemvParams& params, const PackedMatrix& matrix) {
  if (!has_kernels(matrix.format)) return matrix.rows * params.k * element_size(params.dtype);
  return with_format(matrix.format, [&](auto format) {
    return packed_format_workspace_bytes<decltype(format)::value>(params, matrix);
  });
}

void launch_packed_gemv(const GemvParams& params, int x_width, const PackedMatrix& matrix,
                        const RopeAppendParams* rope, void* workspace, cudaStream_t stream) {
  if (params.n == 0) return;
  if (!has_kernels(matrix.format)) {
    launch_packed_dequantize_any(matrix, params.segments[0].weight, params.k, 0, matrix.rows, params.dtype,
                                 workspace, stream);
    return launch_gemv(of_floats(params, workspace), nullptr, stream);
  }
  with_format(matrix.format, [&](auto format) {
    launch_packed_format<decltype(format)::value>(params, x_width, matrix, rope, workspace, stream);
  });
}

}  // namespace hf_fastpath
