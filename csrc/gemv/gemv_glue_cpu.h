// What the glue of gemv, gemv_swiglu and qkv_rope_append shares on the CPU: checked arguments and converted
// activations. Torch-facing; included by *_cpu.cpp only.
#pragma once

#include "common/convert_cpu.h"
#include "common/cpu_glue.h"
#include "gemv/gemv_cpu.h"

namespace hf_fastpath {

// The activation rows of a call, converted to float32 for all threads, and scratch memory behind them.
struct Activations {
  DType dtype;
  int64_t rows, in_features, stride;
  float* data;            // [rows, stride], zeros from in_features on
  float* spare;           // as many floats as were asked for, 64-byte aligned
  const uint16_t* tiles;  // the rows once more, for linear_amx, or null
};

// `tiled`: linear_kernel() will take them.
inline Activations load_activations(const Tensor& x, const char* op, bool tiled, int64_t spare_floats = 0) {
  const DType dtype = dtype_of(x, op);
  STD_TORCH_CHECK(x.dim() >= 1, "hf_fastpath::", op, ": x has no dimensions, expected [..., in_features]");
  const RowView view = row_view(x);
  STD_TORCH_CHECK(view.rows >= 1 && view.rows <= kMaxRows, "hf_fastpath::", op, ": x has ", view.rows,
                  " rows, expected 1 to ", kMaxRows, ": use nn.Linear");
  // A whole cache line, so that rows start aligned and a kernel may read a vector past the end.
  const int64_t stride = round_up(view.columns, 16);
  tiled = tiled && dtype != DType::kFloat32 && view.rows >= kTiledRows && use_amx();
  const int64_t tile_floats = tiled ? tile_elements(dtype, view.rows, view.columns) / 2 : 0;
  float* data = scratch(tile_floats + view.rows * stride + spare_floats);
  auto* tiles = reinterpret_cast<uint16_t*>(data);
  data += tile_floats;  // whole tiles, so that rows are aligned, too
  const auto convert = use_avx2() ? convert_to_float_avx2 : convert_to_float_portable;
  for (int64_t row = 0; row < view.rows; ++row) {
    convert(dtype, at(view.data, row * view.stride, dtype), data + row * stride, view.columns);
    std::fill(data + row * stride + view.columns, data + (row + 1) * stride, 0.0f);
  }
  if (tiled) tiles_of_rows_amx(dtype, view.rows, view.columns, data, stride, tiles);
  return {dtype, view.rows, view.columns, stride, data, data + view.rows * stride, tiled ? tiles : nullptr};
}

// Refuses a weight that does not fit: a kernel would read out of its bounds.
inline void check_weight(const Tensor& weight, const Activations& x, bool transposed, const char* op,
                         const char* name) {
  STD_TORCH_CHECK(dtype_of(weight, op) == x.dtype, "hf_fastpath::", op, ": ", name,
                  " differs from x in dtype: cast one");
  STD_TORCH_CHECK(weight.dim() == 2 && weight.size(transposed ? 0 : 1) == x.in_features, "hf_fastpath::", op,
                  ": ", name, " is not a matrix over x's ", x.in_features, " features");
  STD_TORCH_CHECK(weight.size(1) <= 1 || weight.stride(1) == 1, "hf_fastpath::", op, ": ", name,
                  " has strided rows: make them contiguous");
}

// Arguments of a projection without bias, residual and activation; rows of out are `out_stride` elements
// apart.
inline LinearArgs linear_args(const Activations& x, const Tensor& weight, bool transposed, void* out,
                              int64_t out_stride) {
  LinearArgs args{};
  args.dtype = x.dtype;
  args.rows = x.rows;
  args.in_features = x.in_features;
  args.out_features = weight.size(transposed ? 1 : 0);
  args.x = x.data;
  args.x_stride = x.stride;
  args.tiles = x.tiles;
  args.weight = weight.const_data_ptr();
  args.weight_stride = weight.stride(0);
  args.out = out;
  args.out_stride = out_stride;
  args.activation = Activation::kNone;
  return args;
}

// Threads divide outputs in multiples of the kernels' streams and tiles, and of eight, a store.
constexpr int64_t kOutputGranule = 48;

inline Linear* linear_kernel(bool tiled = false) {
  if (tiled) return linear_amx;
  return use_avx512() ? linear_avx512 : use_avx2() ? linear_avx2 : linear_portable;
}

// Runs body(begin, end) over the outputs of projections of which each reads `output_bytes` of weights.
template <class Body>
void share_outputs(int64_t outputs, int64_t output_bytes, const Body& body) {
  const int64_t parts = std::min(part_count(outputs * output_bytes, kBytesPerPart), outputs);
  share_out(outputs, parts, kOutputGranule, least_piece(output_bytes), body);
}

// All outputs of a projection in the Linear layout.
inline void run_linear(const LinearArgs& args) {
  Linear* const kernel = linear_kernel(args.tiles != nullptr);
  const int64_t matrices = args.up_weight != nullptr ? 2 : 1;
  share_outputs(args.out_features, matrices * args.in_features * element_size(args.dtype),
                [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

}  // namespace hf_fastpath
