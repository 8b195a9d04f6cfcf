// packed_gemm on the CPU: gemm, which widens rows of the weight as it comes to them.
#include <cstring>

#include "common/composed_ops.h"
#include "common/cpu_glue.h"
#include "gemm/gemm_glue_cpu.h"
#include "gemv/gemv_glue_cpu.h"
#include "packed_gemv/packed_gemv_glue_cpu.h"

namespace hf_fastpath {
namespace {

// Rows up to which packed_gemv, kPackedRows at a time, takes less time than widening the weight: more the
// fewer bytes and the faster its products are beside those of x's type. It has no products of integers with x
// in float32, and none with weights in fp8.
int64_t unwidened_rows(DType dtype, PackedForm form) {
  if (dtype != DType::kFloat32 && use_amx()) return form == PackedForm::kFp8 ? kPackedRows : 24;
  if (dtype == DType::kBFloat16 && use_bf16_products()) return form == PackedForm::kInt8 ? 24 : kPackedRows;
  if (form == PackedForm::kFp8) return use_avx512() ? 48 : kPackedRows;
  if (dtype == DType::kFloat32) return kPackedRows;
  if (form == PackedForm::kInt8) return use_avx512() ? 256 : dtype == DType::kBFloat16 ? 28 : kPackedRows;
  return 96;
}

Tensor packed_gemm_cpu(const Tensor& x, const Tensor& raw_quants, const Tensor& raw_scales,
                       const std::optional<Tensor>& raw_zeros, double multiplier, const std::string& format,
                       const std::optional<Tensor>& bias) {
  const char* op = "packed_gemm";
  STD_TORCH_CHECK(x.dim() >= 1 && x.size(x.dim() - 1) > 0, "hf_fastpath::packed_gemm: x has no features");
  const RowView view = row_view(x);
  const PackedTensors weight(raw_quants, raw_scales, raw_zeros);
  const PackedArgs packed = weight.args(view.columns, multiplier, format, op);

  GemmArgs args{};
  args.dtype = dtype_of(x, op);
  args.in_features = view.columns, args.out_features = packed.out_features;
  args.packed = &packed;
  check_vector(bias, args.out_features, args.dtype, op, "bias");
  std::optional<Tensor> bias_holder;
  args.bias = optional_data(bias, bias_holder);
  Tensor out = empty_like_with_sizes(x, sizes_with_last(x, args.out_features));
  args.out = out.mutable_data_ptr();
  if (use_avx2() && view.rows <= unwidened_rows(args.dtype, packed.form)) {
    const int64_t pieces = (view.rows + kPackedRows - 1) / kPackedRows;
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const int64_t first = part_begin(view.rows, pieces, piece);
      const int64_t rows = part_begin(view.rows, pieces, piece + 1) - first;
      const Tensor some = matrix(at(view.data, first * view.stride, args.dtype), args.dtype, rows,
                                 view.columns, view.stride, 1);
      const Tensor made =
          packed_gemv_cpu(some, weight.quants, weight.scales, weight.zeros, multiplier, format, bias,
                          std::nullopt, "none", "none", std::nullopt, std::nullopt, 0.0, false, std::nullopt);
      std::memcpy(at(args.out, first * args.out_features, args.dtype), made.const_data_ptr(),
                  rows * args.out_features * element_size(args.dtype));
    }
    return out;
  }
  run_gemm(args, view);
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(hf_fastpath, CPU, m) { m.impl("packed_gemm", TORCH_BOX(&packed_gemm_cpu)); }

}  // namespace
}  // namespace hf_fastpath
