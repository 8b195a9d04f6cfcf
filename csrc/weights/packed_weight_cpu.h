// A quantized weight as the kernels on the CPU take it, and its rows as floats: free of torch.
// hf_fastpath/packed_formats.py says how quants, scales and zeros lie.
#pragma once

#include "common/dtype.h"
#include "weights/packed_format.h"

namespace hf_fastpath {

// Weight of its sub-block-by-sub-block block that lies at `place`, a byte or four bits.
constexpr int64_t weight_at(PackedFormat format, int64_t place) {
  const int64_t word_size = 32 / bits_of(format), word = place / word_size;
  return word % kSubBlocks * kSubBlock + word / kSubBlocks * word_size + place % word_size;
}

struct PackedWeight {
  PackedFormat format;
  int64_t blocks, out_features;
  const uint8_t* quants;
  const void* scales;    // as the format has them, [out_features, groups]
  const uint8_t* zeros;  // [out_features, groups], or null
  int64_t groups;
  float multiplier;

  int64_t row_bytes() const { return blocks * kPackedBlock * bits_of(format) / 8; }
  int64_t scale_row_bytes() const { return groups * scale_bytes(format); }
  int64_t output_bytes() const { return row_bytes() + scale_row_bytes() + (zeros != nullptr ? groups : 0); }
};

// Rows [begin, end) of the weight in `dtype`, [end - begin, in_features], rounded once.
using DequantizePacked = void(const PackedWeight& weight, int64_t in_features, DType dtype, int64_t begin,
                              int64_t end, void* to);
DequantizePacked dequantize_packed_portable, dequantize_packed_avx2;
DequantizePacked dequantize_packed_avx512_bf16;  // of 16 bits

}  // namespace hf_fastpath
