// What the glue of gemv, gemv_swiglu and qkv_rope_append shares on the CPU: checked arguments and converted
// activations. This header is torch-facing, and *_cpu.cpp alone include it.
#pragma once

#include "common/convert_cpu.h"
#include "common/cpu_glue.h"
#include "common/routes_cpu.h"
#include "gemv/gemv_cpu.h"

namespace hf_fastpath {

// The kernel for `rows` rows of x, and the layout in which it takes them.
inline const Route& linear_route(DType dtype, int64_t rows) {
  return find_route({Product::kLinear, kPlainWeight, dtype, rows});
}

// The kernel for rows of x in float32.
inline Linear* float_linear_kernel(DType dtype) {
  return find_route({Product::kLinearOfFloats, kPlainWeight, dtype, 1}).linear;
}

// Elements between rows of x: whole vectors of 16 bits, and cache lines.
inline int64_t row_stride(int64_t in_features) { return round_up(in_features, 32); }

// Elements of LinearArgs::laid_out.
inline int64_t laid_out_elements(XLayout layout, DType dtype, int64_t rows, int64_t in_features) {
  if (layout == XLayout::kFloats) return 0;
  return layout == XLayout::kAmxTiles ? tile_elements(dtype, rows, in_features)
                                      : rows * row_stride(in_features);
}

// Rows [first, first + rows) of x as a kernel for `layout` takes them, at `floats` or `laid_out` or both.
inline void lay_out(XLayout layout, DType dtype, const RowView& x, int64_t first, int64_t rows, float* floats,
                    uint16_t* laid_out) {
  const int64_t stride = row_stride(x.columns);
  const auto convert = use_avx2() ? convert_to_float_avx2 : convert_to_float_portable;
  for (int64_t row = 0; row < rows; ++row) {
    const void* from = at(x.data, (first + row) * x.stride, dtype);
    if (layout == XLayout::kBFloat16) {
      uint16_t* to = laid_out + row * stride;
      std::memcpy(to, from, x.columns * sizeof(uint16_t));
      std::fill(to + x.columns, to + stride, uint16_t{0});
    } else {
      float* to = floats + row * stride;
      convert(dtype, from, to, x.columns);
      std::fill(to + x.columns, to + stride, 0.0f);
    }
  }
  if (is_possible(kAmxBf16) && layout == XLayout::kAmxTiles)
    tiles_of_rows_amx(dtype, rows, x.columns, floats, stride, laid_out);
}

// The activation rows of a call as kernels take them, for all threads, and scratch memory behind them.
struct Activations {
  DType dtype;
  XLayout layout;
  Linear* kernel;  // for this layout
  int64_t rows, in_features, stride;
  float* data;               // [rows, stride], zeros from in_features on, but in XLayout::kBFloat16
  float* spare;              // as many floats as were asked for, 64-byte aligned
  const uint16_t* laid_out;  // see LinearArgs
};

// `linear`: the kernel of a route will take them; else they are floats.
inline Activations load_activations(const Tensor& x, const char* op, bool linear, int64_t spare_floats = 0) {
  const DType dtype = dtype_of(x, op);
  STD_TORCH_CHECK(x.dim() >= 1, "hf_fastpath::", op, ": x has no dimensions, expected [..., in_features]");
  const RowView view = row_view(x);
  STD_TORCH_CHECK(view.rows >= 1 && view.rows <= kMaxRows, "hf_fastpath::", op, ": x has ", view.rows,
                  " rows, expected 1 to ", kMaxRows, ": use nn.Linear");
  const Route* const route = linear ? &linear_route(dtype, view.rows) : nullptr;
  const XLayout layout = route != nullptr ? route->layout : XLayout::kFloats;
  Linear* const kernel = route != nullptr ? route->linear : nullptr;
  const int64_t stride = row_stride(view.columns);
  const int64_t others = round_up(laid_out_elements(layout, dtype, view.rows, view.columns) / 2, 16);
  const int64_t floats = layout == XLayout::kBFloat16 ? 0 : view.rows * stride;
  float* const memory = scratch(others + floats + spare_floats);
  auto* const laid_out = reinterpret_cast<uint16_t*>(memory);
  lay_out(layout, dtype, view, 0, view.rows, memory + others, laid_out);
  return {dtype,   layout, kernel, view.rows, view.columns, stride, memory + others, memory + others + floats,
          laid_out};
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
  args.laid_out = x.laid_out;
  args.weight = weight.const_data_ptr();
  args.weight_stride = weight.stride(0);
  args.out = out;
  args.out_stride = out_stride;
  args.activation = Activation::kNone;
  return args;
}

// Threads divide outputs in multiples of the kernels' streams and tiles, and of eight, a store.
constexpr int64_t kOutputGranule = 48;

// Runs body(begin, end) over the outputs of projections of which each reads `output_bytes` of weights.
template <class Body>
void share_outputs(int64_t outputs, int64_t output_bytes, const Body& body) {
  const int64_t parts = std::min(part_count(outputs * output_bytes, kBytesPerPart), outputs);
  share_out(outputs, parts, kOutputGranule, least_piece(output_bytes), body);
}

// Computes all outputs of a projection in the Linear layout.
inline void run_linear(const LinearArgs& args, Linear* kernel) {
  const int64_t matrices = args.up_weight != nullptr ? 2 : 1;
  share_outputs(args.out_features, matrices * args.in_features * element_size(args.dtype),
                [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

}  // namespace hf_fastpath
