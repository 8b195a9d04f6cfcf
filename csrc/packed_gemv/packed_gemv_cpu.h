// Products of one to sixteen activation rows with a quantized weight, on the CPU: kernel interface, free of
// torch. hf_fastpath/quantization/formats.py says how quants, scales and zeros lie.
#pragma once

#include "common/dtype.h"

namespace hf_fastpath {

constexpr int64_t kPackedRows = 16;    // activation rows a call may have
constexpr int64_t kPackedBlock = 128;  // weights that are ordered together
constexpr int64_t kStretches = 4;      // of a block, whose 32-bit words take turns
constexpr int64_t kStretch = kPackedBlock / kStretches;
constexpr int64_t kPackedLanes = 8;  // 32-bit sums that the integer kernels keep of a block

enum class PackedForm : int { kInt8, kFp8, kInt4, kInt4G32 };

constexpr int bits_of(PackedForm form) {
  return form == PackedForm::kInt8 || form == PackedForm::kFp8 ? 8 : 4;
}

// Weight of its stretch-by-stretch block that lies at `place`, a byte or four bits.
constexpr int64_t weight_at(PackedForm form, int64_t place) {
  const int64_t word_size = 32 / bits_of(form), word = place / word_size;
  return word % kStretches * kStretch + word / kStretches * word_size + place % word_size;
}

// Place whose weight meets step `i` of a block in the integer kernels. Bytes in order. Four bits: 16-bit
// pieces of half a block, one for each step of a vector, and of each its lowest four bits, then the next.
constexpr int64_t place_of_step(PackedForm form, int64_t i) {
  if (bits_of(form) == 8) return i;
  const int64_t half = i / 64, plane = i / 16 % 4, piece = i % 16;
  return half * 64 + piece * 4 + plane;
}

struct PackedArgs {
  DType dtype;  // of bias, residual and out
  PackedForm form;
  int64_t rows, blocks, out_features;
  // x as the weights lie, [rows, blocks * kPackedBlock], zeros behind the last input.
  const float* x;
  // x as integers, or null: [rows, blocks, kPackedBlock] in the order of place_of_step; what a step is worth,
  // [rows, blocks, kPackedLanes] by the lane its products end in; and the lanes' sums of steps.
  const int16_t* steps;
  const float* step_sizes;
  const int32_t* step_sums;
  const uint8_t* quants;
  const uint16_t* scales;  // float16 [out_features, groups]
  const uint8_t* zeros;    // [out_features, groups], or null
  int64_t groups;
  float multiplier;
  const void* bias;      // [out_features] or null
  const void* residual;  // [rows, out_features], contiguous, or null; added after the activation
  void* out;             // [rows, out_features]
  Activation activation;

  int64_t row_bytes() const { return blocks * kPackedBlock * bits_of(form) / 8; }
};

// Computes outputs [begin, end) of every row. The sums of an output do not depend on the range.
void packed_gemv_portable(const PackedArgs& args, int64_t begin, int64_t end);
void packed_gemv_avx2(const PackedArgs& args, int64_t begin, int64_t end);

}  // namespace hf_fastpath
