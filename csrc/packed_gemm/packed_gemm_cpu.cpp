// packed_gemm on the CPU: gemm, which dequantizes rows of the weight as it comes to them.
#include <cstring>

#include "common/composed_ops.h"
#include "common/cpu_glue.h"
#include "gemm/gemm_glue_cpu.h"
#include "gemv/gemv_glue_cpu.h"
#include "packed_gemv/packed_gemv_glue_cpu.h"

namespace hf_fastpath {
namespace {

// Rows up to which packed_gemv's kernels, some at a time, take less time than dequantizing the weight: more
// the fewer bytes and the faster their products are beside those of x's type. With AVX-512 there are none of
// integers with x in float32, and none with weights in fp8; with AMX tiles take what they would.
int64_t most_packed_gemv_rows(DType dtype, PackedFormat format) {
  if (dtype != DType::kFloat32 && use_amx()) return kPackedRows;
  if (!use_avx512()) return dtype != DType::kFloat32 ? 96 : bits_of(format) == 8 ? 48 : kDequantizedRows;
  if (format == PackedFormat::kFp8) return 48;
  if (dtype == DType::kFloat32) return kPackedRows;
  return format == PackedFormat::kInt8 ? 256 : 96;
}

// Up to kMaxPackedAmxRows in tiles; false where that may be wrong. gemm's tiles take more.
bool run_amx(PackedArgs args, const RowView& x) {
  const int64_t width = args.weight.blocks * kPackedBlock;
  const int64_t tile_floats = packed_tile_elements(args.dtype, x.rows, width) / 2;
  float* const memory = scratch(tile_floats + x.rows * width);
  auto* const tiles = reinterpret_cast<uint16_t*>(memory);
  float* const floats = memory + tile_floats;
  convert_rows(args.dtype, x, width, floats);
  packed_tiles_amx(args.dtype, x.rows, width, floats, tiles);
  args.rows = x.rows, args.tiles = tiles;
  return run_packed_amx(args);
}

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
  const bool tiled =
      view.rows > kPackedRows && view.rows <= kMaxPackedAmxRows && use_amx_products(args.dtype);
  if (tiled) {
    PackedArgs call{};
    call.weight = packed, call.dtype = args.dtype, call.bias = args.bias, call.out = args.out;
    if (run_amx(call, view)) return out;
  }
  const bool by_packed_gemv = use_avx2() && view.rows <= most_packed_gemv_rows(args.dtype, packed.format);
  if (tiled || (by_packed_gemv && !takes_pairs(args, view.rows))) {
    const int64_t most = takes_floats(args.dtype, packed.format, view.rows) ? kDequantizedRows : kPackedRows;
    const int64_t pieces = (view.rows + most - 1) / most;
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const int64_t first = part_begin(view.rows, pieces, piece);
      const int64_t rows = part_begin(view.rows, pieces, piece + 1) - first;
      const Tensor some = matrix(at(view.data, first * view.stride, args.dtype), args.dtype, rows,
                                 view.columns, view.stride, 1);
      const Tensor made = packed_rows_cpu(some, tensors.quants, tensors.scales, tensors.zeros, multiplier,
                                          format, bias, std::nullopt, number_of(Activation::kNone));
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
