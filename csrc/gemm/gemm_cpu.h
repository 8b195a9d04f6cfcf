// Products of many activation rows with a weight, on the CPU: kernel interface, free of torch.
// Experiments: docs/lab/gemm.md
#pragma once

#include "common/amx_terms.h"
#include "weights/packed_weight_cpu.h"

namespace hf_fastpath {

// Inputs of one block. Accumulators of a block start from zero, so chains of float32 additions stay short.
constexpr int64_t kGemmDepth = 256;
// Most outputs of one strip: with kGemmDepth inputs 128 KiB of float32, which a second-level cache holds.
constexpr int64_t kGemmStrip = 128;
// Strips begin at multiples of this: the outputs of the wider kernel's panel.
constexpr int64_t kGemmPanel = 32;

struct GemmArgs {
  DType dtype;  // of weight, bias, residual and out
  int64_t rows;
  int64_t in_features;
  int64_t out_features;
  const float* x;         // [blocks of inputs, rows, kGemmDepth], zeros from in_features on
  const uint16_t* tiles;  // or as gemm_tiles_amx() or gemm_paired_rows_avx512_bf16() lays x out, for theirs
  const void* weight;     // [out_features, in_features], or [in_features, out_features] if transposed
  int64_t weight_stride;  // elements between rows of the weight
  bool transposed;
  const PackedWeight* packed;  // of what the weight, not transposed, is made, row by row; or null
  const void* bias;            // [out_features] or null
  const void* residual;        // [rows, out_features], contiguous, or null; added after the activation
  void* out;                   // [rows, out_features], contiguous
  Activation activation;
};

// Floats of scratch memory that a strip of `rows` rows takes: a block of the weight, and accumulators.
constexpr int64_t gemm_scratch_floats(int64_t rows) { return kGemmStrip * (kGemmDepth + rows); }

// Computes rows [row_begin, row_end) of outputs [begin, end). The order of an output's sums depends on
// nothing but in_features. `scratch` is 64-byte aligned.
using GemmStrip = void(const GemmArgs& args, int64_t row_begin, int64_t row_end, int64_t begin, int64_t end,
                       float* scratch);
GemmStrip gemm_strip_avx2;
GemmStrip gemm_strip_avx512;

// The same of all rows, with x and the weight in 16 bits, from args.tiles; `scratch`: a float for each output
// and row, rows in multiples of kAmxPairRows. False where a sum in float16 is not finite: then what is
// written may be wrong.
bool gemm_strip_amx(const GemmArgs& args, int64_t begin, int64_t end, float* scratch);
constexpr int64_t kAmxGroupRows = 16, kAmxPairRows = 32;  // rows of x whose products are summed together

// Groups [begin, end) of rows of x, `stride` elements apart, as bfloat16 [blocks of inputs, pairs of groups,
// 32 inputs, terms of a value, groups of a pair, 512]: args.tiles.
void gemm_tiles_amx(const GemmArgs& args, const void* x, int64_t stride, int64_t begin, int64_t end,
                    uint16_t* tiles);
// Inputs of these, zeros behind x's.
constexpr int64_t gemm_padded_width(int64_t in_features) {
  return (in_features + kPackedBlock - 1) / kPackedBlock * kPackedBlock;
}

// The same of all rows, at least kPairedRows / 2, with x and the weight in bfloat16, from args.tiles;
// `accumulators`: gemm_paired_floats() of them, 64-byte aligned.
void gemm_pairs_avx512_bf16(const GemmArgs& args, int64_t begin, int64_t end, float* accumulators);
constexpr int64_t kPairedRows = 8;    // most rows of x that meet an output at once
constexpr int64_t kPairedStrip = 48;  // outputs whose accumulators are kept
constexpr int64_t gemm_paired_groups(int64_t rows) { return (rows + kPairedRows - 1) / kPairedRows; }
constexpr int64_t gemm_paired_floats(int64_t rows) {
  return kPairedStrip * kPairedRows * gemm_paired_groups(rows);
}

// Groups [begin, end) of rows of x, `stride` elements apart, as [blocks of inputs, groups, 32 inputs, rows of
// a group, 32]: args.tiles, gemm_padded_width() elements a row.
void gemm_paired_rows_avx512_bf16(const GemmArgs& args, const void* x, int64_t stride, int64_t begin,
                                  int64_t end, uint16_t* to);

// out = activation(accumulators + bias) + residual, for products that were computed elsewhere.
struct FinishArgs {
  DType dtype;              // of bias, residual and out
  DType accumulator_dtype;  // kFloat32, or `dtype`
  int64_t rows, columns;
  const void* accumulators;  // [rows, columns], rows accumulator_stride elements apart; may be `out`
  int64_t accumulator_stride;
  const void* bias;      // [columns] or null
  const void* residual;  // [rows, columns] or null, rows `stride` elements apart
  void* out;             // the same
  int64_t stride;
  Activation activation;
};

void finish_rows_portable(const FinishArgs& args, int64_t begin, int64_t end);
void finish_rows_avx2(const FinishArgs& args, int64_t begin, int64_t end);

}  // namespace hf_fastpath
