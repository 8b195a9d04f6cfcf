// Products of one to sixteen activation rows with a weight, on the CPU: kernel interface, free of torch. The
// ops gemv, gemv_swiglu and qkv_rope_append are glue over these kernels.
// Experiments: docs/lab/gemv_cpu.md
#pragma once

#include "common/dtype.h"

namespace hf_fastpath {

constexpr int64_t kMaxRows = 16;  // activation rows a call may have; sizes the kernels' stack tiles

// How a kernel takes the rows of x.
enum class XLayout : int {
  kFloats,    // float32
  kBFloat16,  // as they are in bfloat16
  kAmxTiles,  // as tiles_of_rows_amx lays them out
};

// One projection. Activations are converted once a call, for all threads.
struct LinearArgs {
  DType dtype;   // of weights, bias, residual and out
  int64_t rows;  // activation rows, 1 to kMaxRows, or kMaxAmxRows for linear_amx
  int64_t in_features;
  int64_t out_features;
  const float* x;  // [rows, x_stride], zeros from in_features on; nothing where laid_out is all that is read
  int64_t x_stride;          // multiple of 16, of 32 for linear_avx512_bf16; at least in_features
  const uint16_t* laid_out;  // x in another layout, [rows, x_stride] as above or tiles
  const void* weight;  // [out_features, in_features], or [in_features, out_features] for the conv1d kernels
  int64_t weight_stride;  // elements between rows of the weight
  const void* up_weight;  // like weight, or null: out = activation(x @ weight.T) * (x @ up_weight.T)
  int64_t up_stride;
  const void* bias;      // [out_features] or null
  const void* residual;  // [rows, out_features], contiguous, or null; added after the activation
  void* out;             // [rows, out_features], rows `out_stride` elements apart
  int64_t out_stride;
  Activation activation;
  int64_t ahead;  // bytes from a weight to what is prefetched with it; 0: to what is read next
};

// nn.Linear layout: computes outputs [begin, end) of every row. The sums of an output do not depend on the
// range.
using Linear = void(const LinearArgs& args, int64_t begin, int64_t end);
Linear linear_portable, linear_avx2, linear_avx512;

// The same from args.laid_out: of bfloat16, and in tiles of 16-bit types, which also read x where a product
// is left to linear_avx512.
Linear linear_avx512_bf16, linear_amx;

// Most rows that linear_amx takes.
constexpr int64_t kMaxAmxRows = 32;

// Columns of x that a tile has: one a row in bfloat16, two in float16, whose rows come in groups of eight.
constexpr int64_t tile_columns(DType dtype, int64_t rows) {
  return dtype == DType::kBFloat16 && rows <= 8 ? 8 : 16;
}

// How many times tile_columns() hold all rows of x.
constexpr int64_t tile_groups(DType dtype, int64_t rows) {
  return dtype == DType::kFloat16 ? (rows + 7) / 8 : (rows + 15) / 16;
}

// Elements of args.laid_out in tiles.
constexpr int64_t tile_elements(DType dtype, int64_t rows, int64_t in_features) {
  return tile_groups(dtype, rows) * (in_features + 31) / 32 * 32 * tile_columns(dtype, rows);
}

// Rows of x, float32 values of `dtype`, as bfloat16 [groups, blocks of 32 inputs, 16 pairs, columns, 2]. For
// float16 eight columns are the rows' first eight significant bits, eight the others, times 2^102.
void tiles_of_rows_amx(DType dtype, int64_t rows, int64_t in_features, const float* x, int64_t x_stride,
                       uint16_t* tiles);

// Conv1D layout: writes to partial[row * partial_stride + n] the sum over inputs [k_begin, k_end) for the
// outputs n in [n_begin, n_end). The sums depend on the input range, not on the output range.
void conv1d_portable(const LinearArgs& args, int64_t k_begin, int64_t k_end, int64_t n_begin, int64_t n_end,
                     float* partial, int64_t partial_stride);
void conv1d_avx2(const LinearArgs& args, int64_t k_begin, int64_t k_end, int64_t n_begin, int64_t n_end,
                 float* partial, int64_t partial_stride);

// Adds the `parts` partials, `part_stride` floats apart, in order, and applies bias, activation and residual
// to outputs [n_begin, n_end) of every row.
void conv1d_merge_portable(const LinearArgs& args, int64_t n_begin, int64_t n_end, const float* partials,
                           int64_t parts, int64_t part_stride, int64_t partial_stride);
void conv1d_merge_avx2(const LinearArgs& args, int64_t n_begin, int64_t n_end, const float* partials,
                       int64_t parts, int64_t part_stride, int64_t partial_stride);

}  // namespace hf_fastpath
