// The arguments of exponential_race. This file is free of torch.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace hf_fastpath {

struct ExponentialRaceParams {
  const void* logits;      // [rows, vocab_size], rows `stride` elements apart
  const float* noise;      // [rows, vocab_size]
  const double* settings;  // temperature, top_k, top_p, min_p
  float* out;              // [rows, vocab_size]
  int64_t rows, vocab_size, stride;
  bool programmatic_launch;
  DType dtype;
};

}  // namespace hf_fastpath
