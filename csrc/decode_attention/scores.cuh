// What is done to scores in front of the softmax: a cap, and a slope or a bias by position.
#pragma once

#include "common/numeric.cuh"
#include "common/softmax.cuh"
#include "decode_attention/decode_attention.h"
#include "decode_attention/split.cuh"

namespace hf_fastpath {

// cap * tanh(score / cap), as exact as 16-bit queries need: 2^-22 of the cap.
__device__ __forceinline__ float soft_capped(float score, float cap) {
  return cap - 2.f * cap / (1.f + exp2f(score * (2.f * kLog2e / cap)));
}

// Where the biases of a head begin.
__device__ __forceinline__ int bias_row(const DecodeAttentionParams& p, int batch_row, int head) {
  return (batch_row * p.bias_heads + head) * p.distances;
}

// The slope of a head, in units of log2(e) as scores are; 0 for none. With biases the bits of where the
// head's row begins, so that a row holds one register more, whichever of the two it needs.
__device__ __forceinline__ float slope_of(const DecodeAttentionParams& p, int batch_row, int head) {
  if (p.biases) return __int_as_float(bias_row(p, batch_row, head));
  return p.slopes ? p.slopes[head] * kLog2e : 0.f;
}

// The bias of a position that is `distance` behind; of positions that nobody sees, which are further on, any.
__device__ __forceinline__ float bias_at(const DecodeAttentionParams& p, int row, int distance) {
  return __ldg(p.biases + row + max(0, min(distance, p.distances - 1)));
}

// Score of a position, in units of log2(e), where the row sees `length` tokens. Slopes count from the newest
// position, where they have to be exact; the softmax does not see the difference.
template <bool kExact>
__device__ __forceinline__ float changed_score(const DecodeAttentionParams& p, float score, float slope,
                                               int position, int length) {
  if (p.softcap > 0.f) {
    const float cap = p.softcap * kLog2e;
    score = kExact ? cap * tanhf(score / cap) : soft_capped(score, cap);
  }
  if (p.biases) return fmaf(bias_at(p, __float_as_int(slope), length - 1 - position), kLog2e, score);
  return p.slopes ? fmaf(slope, float(position - length + 1), score) : score;
}

}  // namespace hf_fastpath
