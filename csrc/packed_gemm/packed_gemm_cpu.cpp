// packed_gemm on the CPU: checks, and the routes that no other op has. gemm's routes dequantize rows of the
// weight as they come to them.
#include "common/cpu_glue.h"
#include "gemm/gemm_glue_cpu.h"
#include "packed_gemm/packed_gemm_routes_cpu.h"
#include "packed_gemv/packed_gemv_cpu.h"
#include "weights/packed_tensors_cpu.h"

namespace hf_fastpath {
namespace {

// Rows of x at a time, at most `most`, by a route of packed_gemv.
bool run_in_pieces(const GemmArgs& args, const RowView& x, int64_t most) {
  const int64_t pieces = (x.rows + most - 1) / most;
  for (int64_t piece = 0; piece < pieces; ++piece) {
    const int64_t first = part_begin(x.rows, pieces, piece);
    RowView some = x;
    some.rows = part_begin(x.rows, pieces, piece + 1) - first;
    some.data = at(x.data, first * x.stride, args.dtype);
    run_product(Product::kPackedGemv, rows_of(args, first, some.rows), some);
  }
  return true;
}

}  // namespace

bool packed_in_pieces_16(const GemmArgs& args, const RowView& x) {
  return run_in_pieces(args, x, kPackedRows);
}
bool packed_in_pieces_32(const GemmArgs& args, const RowView& x) {
  return run_in_pieces(args, x, kDequantizedRows);
}

namespace {

Tensor packed_gemm_cpu(const Tensor& x, const Tensor& raw_quants, const Tensor& raw_scales,
                       const std::optional<Tensor>& raw_zeros, double multiplier, int64_t format,
                       const std::optional<Tensor>& bias) {
  const char* op = "packed_gemm";
  STD_TORCH_CHECK(x.dim() >= 1 && x.size(x.dim() - 1) > 0, "hf_fastpath::packed_gemm: x has no features");
  const RowView view = row_view(x);
  const PackedTensors tensors(raw_quants, raw_scales, raw_zeros);
  const PackedWeight packed = tensors.weight(view.columns, multiplier, format, op);

  GemmArgs args{};
  args.dtype = dtype_of(x, op);
  args.in_features = view.columns, args.out_features = packed.out_features;
  args.packed = &packed;
  check_vector(bias, args.out_features, args.dtype, op, "bias");
  std::optional<Tensor> bias_holder;
  args.bias = optional_data(bias, bias_holder);
  Tensor out = empty_like_with_sizes(x, sizes_with_last(x, args.out_features));
  args.out = out.mutable_data_ptr();
  run_product(Product::kPackedGemm, args, view);
  return out;
}

HF_FASTPATH_KERNEL(CPU, "packed_gemm", packed_gemm_cpu)

}  // namespace
}  // namespace hf_fastpath
