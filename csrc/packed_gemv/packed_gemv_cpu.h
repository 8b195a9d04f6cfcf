// Products of one to sixteen activation rows with a quantized weight, on the CPU: kernel interface, free of
// torch.
// Experiments: docs/lab/packed_gemv_cpu.md
#pragma once

#include "common/amx_terms.h"
#include "common/dtype.h"
#include "weights/packed_weight_cpu.h"

namespace hf_fastpath {

constexpr int64_t kPackedRows = 16;       // activation rows a call may have
constexpr int64_t kDequantizedRows = 32;  // the same of packed_floats_avx2

// Sums of a block that the integer kernels weight: one a sub-block where a block of 4 bits has several
// scales, else two.
constexpr int64_t lanes_of(PackedFormat format) {
  return bits_of(format) == 4 && sub_blocks_of_scale(format) < kSubBlocks ? 4 : 8;
}

constexpr int64_t kStepBytes = 2 * kPackedBlock;  // x as integers, a block

// One product. The weight is what the call reads; all else is of the call.
struct PackedArgs {
  PackedWeight weight;
  DType dtype;  // of bias, residual and out
  int64_t rows;
  // x as the weights lie, [rows, weight.blocks * kPackedBlock], zeros behind the last input.
  const float* x;
  const uint16_t* tiles;  // or, for packed_gemm_amx, in order, as packed_tiles_amx lays it out
  // x as integers, or null: [rows, step_blocks, kStepBytes]. For quants in bytes int16, the i-th meets the
  // quant at place i. For four bits, int16 whose i-th meets the i / 32-th lowest of the block's 16-bit piece
  // i % 32; or with `split`, which tables do not have, steps as 256 * high + low in bytes: high of those that
  // meet the lower halves of the block's 64 bytes, of those that meet the upper, then low of both.
  const void* steps;
  bool split;
  const float* step_sizes;    // [rows, step_blocks, lanes]: what a step is worth, by its product's lane
  const float* step_offsets;  // likewise: the lane's sum of steps, times what is to be added to all quants
  int64_t step_blocks;        // weight.blocks and up to three more, of size zero: a multiple of four
  const void* bias;           // [out_features] or null
  const void* residual;       // [rows, out_features], contiguous, or null; added after the activation
  void* out;                  // [rows, out_features]
  Activation activation;
};

// Computes outputs [begin, end) of every row. The sums of an output do not depend on the range. All but the
// first take x in steps, and in float32 with weights in fp8.
using PackedGemv = void(const PackedArgs& args, int64_t begin, int64_t end);
PackedGemv packed_gemv_portable, packed_gemv_avx2, packed_gemv_avx512, packed_gemv_avx512_vnni;

// The same for up to kDequantizedRows of x in float32, with any weight.
PackedGemv packed_floats_avx2;

// The same of up to so many rows in 16 bits, from args.tiles. False where a sum in float16 is not finite:
// then what is written may be wrong.
bool packed_gemm_amx(const PackedArgs& args, int64_t begin, int64_t end);

// Rows of x, `width` float32 values of `dtype` in order, as bfloat16 [terms, groups of 16 rows, sub-blocks,
// 16 pairs of inputs, 16 rows, 2]. The terms of float16 are its first eight significant bits and the others.
void packed_tiles_amx(DType dtype, int64_t rows, int64_t width, const float* x, uint16_t* tiles);
constexpr int64_t packed_tile_elements(DType dtype, int64_t rows, int64_t width) {
  return (rows + 15) / 16 * 16 * width * tile_terms(dtype);
}

// Inputs of a row, float32 in order, as args.steps and what belongs to it. False where one is not finite.
bool packed_steps_avx2(const PackedArgs& args, const float* x, void* steps, float* sizes, float* offsets);

}  // namespace hf_fastpath
