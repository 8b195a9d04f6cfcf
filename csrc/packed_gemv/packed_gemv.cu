// Which kernel a product with a quantized matrix gets: one form of packed_gemv_kernel (packed_gemv_ring.cuh)
// a format.

#include <stdexcept>
#include <type_traits>

#include "packed_gemv/packed_gemv.h"

namespace hf_fastpath {

bool fits_packed_gemv(const GemvParams& p) { return p.norm.kind != Norm::kLayer; }

bool fits_packed_append(const GemvParams& p, const RopeAppendParams& rope) {
  constexpr int kMostFloatRows = 4;  // of sixteen columns
  return rope.head_dim % 2 == 0 && !is_quantized(rope.kv_type) &&
         (p.dtype != DType::kFloat32 || p.m <= kMostFloatRows);
}

namespace {

// Calls f(the format as a constant).
template <class F>
auto with_form(PackedForm form, F&& f) {
  switch (form) {
    case PackedForm::kInt8:
      return f(std::integral_constant<PackedForm, PackedForm::kInt8>{});
    case PackedForm::kFp8:
      return f(std::integral_constant<PackedForm, PackedForm::kFp8>{});
    case PackedForm::kInt4:
      return f(std::integral_constant<PackedForm, PackedForm::kInt4>{});
    case PackedForm::kInt4G32:
      return f(std::integral_constant<PackedForm, PackedForm::kInt4G32>{});
  }
  throw std::runtime_error("hf_fastpath: unknown format of quantized weights");
}

}  // namespace

int64_t packed_gemv_workspace_bytes(const GemvParams& params, const PackedMatrix& matrix) {
  return with_form(matrix.form, [&](auto form) {
    return packed_form_workspace_bytes<decltype(form)::value>(params, matrix);
  });
}

void launch_packed_gemv(const GemvParams& params, int x_width, const PackedMatrix& matrix,
                        const RopeAppendParams* rope, void* workspace, cudaStream_t stream) {
  if (params.n == 0) return;
  with_form(matrix.form, [&](auto form) {
    launch_packed_form<decltype(form)::value>(params, x_width, matrix, rope, workspace, stream);
  });
}

}  // namespace hf_fastpath
