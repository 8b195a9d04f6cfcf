// Product of one row with a weight in Q4_0, on the CPU: kernel interface, free of torch.
#pragma once

#include "common/dtype.h"

namespace hf_fastpath {

constexpr int64_t kQ40Group = 32;       // weights that share a scale
constexpr int64_t kQ40QuantBytes = 16;  // byte i: weight i in the low four bits, i + 16 in the high ones
constexpr int64_t kQ40BlockBytes = 18;  // interleaved: the float16 scale, then quants

constexpr int kQ40Zero = 8;  // quant of the weight 0

struct Q40Args {
  DType dtype;  // of out
  int64_t groups, out_features;
  // x in float32 and, or null, in steps of a size that each group has for itself.
  const float* x;
  const int16_t* steps;
  const float* sizes;  // [groups]: what a step is worth
  const uint8_t* quants;
  const uint8_t* scales;  // float16, or null: interleaved
  void* out;

  const uint8_t* quants_of(int64_t row, int64_t group) const {
    const int64_t at = row * groups + group;
    return scales == nullptr ? quants + at * kQ40BlockBytes + 2 : quants + at * kQ40QuantBytes;
  }
  const uint8_t* scale_of(int64_t row, int64_t group) const {
    const int64_t at = row * groups + group;
    return scales == nullptr ? quants + at * kQ40BlockBytes : scales + at * 2;
  }
};

// Computes outputs [begin, end).
using Q40Gemv = void(const Q40Args& args, int64_t begin, int64_t end);
Q40Gemv q4_0_gemv_portable, q4_0_gemv_avx2;

}  // namespace hf_fastpath
