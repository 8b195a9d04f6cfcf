// A product with a quantized matrix by its route: the variant of packed_gemv_kernel (packed_gemv_ring.cuh)
// for its format, or one of gemv's kernels over the dequantized matrix.

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

// Null if no kernel does all of it at once.
const CudaRoute* route_of(const GemvParams& p, const PackedMatrix& matrix, CallFacts facts) {
  if (!has_gpu_products(matrix.format)) {  // a workspace is aligned as this pointer is
    facts |= fits_one_kernel(of_floats(p, nullptr), nullptr) ? kDense : 0;
  }
  return find_cuda_route(
      {CudaProduct::kPackedGemv, packed_weight(static_cast<int>(matrix.format)), p.dtype, p.m, facts});
}

bool dequantizes(const GemvParams& p, const PackedMatrix& matrix) {
  const CudaRoute* const route = route_of(p, matrix, norm_facts(p.norm));
  return route != nullptr && route->dequantizes;
}

}  // namespace

bool fits_packed_gemv(const GemvParams& p, const PackedMatrix& matrix) {
  return route_of(p, matrix, norm_facts(p.norm)) != nullptr;
}

bool fits_packed_append(const GemvParams& p, const PackedMatrix& matrix, const RopeAppendParams& rope) {
  const bool turns_neighbors = rope.neighbors && rope.rotary_dim > 0;  // rows_together() needs rows in order
  const bool wants_head = rope.head_dim % 2 != 0 || is_quantized(rope.kv_type) || turns_neighbors;
  return route_of(p, matrix, kAppend | (wants_head ? kHeadAppend : 0)) != nullptr;
}

int64_t packed_gemv_workspace_bytes(const GemvParams& params, const PackedMatrix& matrix) {
  if (dequantizes(params, matrix)) return matrix.rows * params.k * element_size(params.dtype);
  if (reads_records(matrix.format)) return 0;
  return with_gpu_format(matrix.format, [&](auto format) {
    return packed_format_workspace_bytes<decltype(format)::value>(params, matrix);
  });
}

void launch_packed_gemv(const GemvParams& params, int x_width, const PackedMatrix& matrix,
                        const RopeAppendParams* rope, void* workspace, cudaStream_t stream) {
  if (params.n == 0) return;
  if (dequantizes(params, matrix)) {
    launch_packed_dequantize_any(matrix, params.segments[0].weight, params.k, 0, matrix.rows, params.dtype,
                                 workspace, stream);
    return launch_gemv(of_floats(params, workspace), nullptr, stream);
  }
  if (reads_records(matrix.format)) return launch_packed_gemv_records(params, x_width, matrix, stream);
  with_gpu_format(matrix.format, [&](auto format) {
    launch_packed_format<decltype(format)::value>(params, x_width, matrix, rope, workspace, stream);
  });
}

}  // namespace hf_fastpath
