// Buffers through which GPUs of one host send each other data, as ops/sum_ranks.py describes them. This file
// is free of torch.
#pragma once

#include <cstdint>

namespace hf_fastpath {

constexpr int kMaxRanks = 8;  // GPUs of one host

struct PeerParams {
  void* buffers[kMaxRanks];  // of every rank, [slots, size, words] of 16 bytes each
  int32_t* status;           // becomes 1 if a rank did not come in time
  int64_t words;             // of a region
  int size, rank, slot;
};

}  // namespace hf_fastpath
