// The arguments of greedy_token and what its CPU and CUDA kernels share. This file is free of torch.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/dtype.h"

#if defined(__CUDACC__)
#define HF_FASTPATH_BOTH __host__ __device__
#else
#define HF_FASTPATH_BOTH
#endif

namespace hf_fastpath {

struct GreedyTokenParams {
  const void* logits;  // [batch, vocab_size], rows `stride` elements apart
  int64_t vocab_size, stride;
  int64_t* unfinished;  // [batch]
  int64_t* tokens;      // [batch]
  int64_t* positions;   // [batch]
  int32_t* seq_lens;    // [batch]
  int64_t* record;      // [slots, 2, batch]
  int64_t slots;
  const int64_t* eos_tokens;  // [num_eos_tokens] or null
  int64_t num_eos_tokens;
  const int64_t* pad_token;  // one, or null
  int batch;
  bool programmatic_launch;
  DType dtype;
};

// A number that is larger for the logit that argmax prefers: the larger value, NaN before all, the first of
// equals.
HF_FASTPATH_BOTH inline uint64_t preference(float logit, int64_t index) {
  const float value = logit + 0.0f;  // -0 equals 0
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  bits = value != value ? 0xffffffffu : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return uint64_t(bits) << 32 | (0xffffffffu - static_cast<uint32_t>(index));
}

HF_FASTPATH_BOTH inline int64_t preferred_index(uint64_t preference) {
  return 0xffffffffu - static_cast<uint32_t>(preference);
}

// What the choice for a row finds.
struct TokenState {
  int64_t unfinished, position, pad_token;
  int32_t seq_len;
};

HF_FASTPATH_BOTH inline TokenState token_state(const GreedyTokenParams& p, int row) {
  return {p.unfinished[row], p.positions[row], p.eos_tokens != nullptr ? *p.pad_token : 0, p.seq_lens[row]};
}

// The token that the row gets for `token`.
HF_FASTPATH_BOTH inline int64_t taken_token(const GreedyTokenParams& p, const TokenState& state,
                                            int64_t token) {
  return p.eos_tokens != nullptr && state.unfinished != 1 ? state.pad_token : token;
}

// Everything after that; `ends`: the token is among eos_tokens.
HF_FASTPATH_BOTH inline void take_token(const GreedyTokenParams& p, int row, const TokenState& state,
                                        int64_t token, bool ends) {
  const int64_t unfinished = ends ? 0 : state.unfinished;
  p.unfinished[row] = unfinished;
  p.tokens[row] = token;
  p.positions[row] = state.position + 1;
  const int32_t seq_len = state.seq_len + 1;
  p.seq_lens[row] = seq_len;
  const int64_t at = seq_len % p.slots;
  int64_t* slot = p.record + (at < 0 ? at + p.slots : at) * 2 * p.batch;
  slot[row] = token;
  slot[p.batch + row] = unfinished;
}

#undef HF_FASTPATH_BOTH

}  // namespace hf_fastpath
