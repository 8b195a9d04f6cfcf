// How GPUs of one host send each other data: every rank stores into the memory of the others, and a word that
// has arrived says so by itself, as in NCCL's LL protocol and TensorRT-LLM's Lamport.
#pragma once

#include "common/async.cuh"
#include "common/peers.h"

namespace hf_fastpath {

// 32 bits of a word that has not arrived: a NaN, or two. Data that happen to be this become another NaN.
constexpr uint32_t kAbsent = 0xffffffffu, kOtherNan = 0x7fff7fffu;
constexpr int64_t kLookNs = 1'000'000;           // after so long, looks at whether others have given up
constexpr int64_t kPatienceNs = 20'000'000'000;  // less than the host's, decode/ranks.py:PATIENCE
constexpr int kPolls = 64;                       // between two looks at the clock

__device__ __forceinline__ uint4* peer_word(const PeerParams& p, int of, int from, int64_t word) {
  return static_cast<uint4*>(p.buffers[of]) + ((int64_t(p.slot) * p.size + from) * p.words + word);
}

__device__ __forceinline__ int64_t clock_ns() {
  int64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

__device__ __forceinline__ uint4 load_peer(const uint4* p) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_peer(uint4* p, const uint4& v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

__device__ __forceinline__ bool is_absent(const uint4& v) {
  return v.x == kAbsent || v.y == kAbsent || v.z == kAbsent || v.w == kAbsent;
}

__device__ __forceinline__ uint4 sendable(uint4 v) {
  v.x = v.x == kAbsent ? kOtherNan : v.x, v.y = v.y == kAbsent ? kOtherNan : v.y;
  v.z = v.z == kAbsent ? kOtherNan : v.z, v.w = v.w == kAbsent ? kOtherNan : v.w;
  return v;
}

// Sends one word to all other ranks, and receives one of each; of[rank] is what was sent. A rank that does
// not come in time is noted, and then nothing is waited for any more.
//
// The words are absent again when this returns. A slot may be used anew two exchanges later: until then a
// faster rank, which needs a word of the exchange between, does not come to it.
__device__ __forceinline__ void exchange(const PeerParams& p, int64_t word, const uint4& mine,
                                         uint4 (&of)[kMaxRanks]) {
  const uint4 sent = sendable(mine);
#pragma unroll
  for (int r = 0; r < kMaxRanks; ++r) {
    of[r] = sent;
    if (r < p.size && r != p.rank) store_peer(peer_word(p, r, p.rank, word), sent);
  }
  int64_t begin = 0, look = 0;
  for (int polls = 0;; ++polls) {
    bool missing = false;
#pragma unroll
    for (int r = 0; r < kMaxRanks; ++r) {
      if (r >= p.size || r == p.rank) continue;
      of[r] = load_peer(peer_word(p, p.rank, r, word));
      missing = missing || is_absent(of[r]);
    }
    if (!missing) break;
    if (polls % kPolls != kPolls - 1) continue;
    const int64_t now = clock_ns();
    if (begin == 0) begin = look = now;
    if (now - look < kLookNs) continue;
    look = now;
    volatile int32_t* status = p.status;
    if (*status != 0) break;
    if (now - begin > kPatienceNs) {
      *status = 1;
      break;
    }
  }
#pragma unroll
  for (int r = 0; r < kMaxRanks; ++r) {
    if (r < p.size && r != p.rank) {
      *peer_word(p, p.rank, r, word) = make_uint4(kAbsent, kAbsent, kAbsent, kAbsent);
    }
  }
}

}  // namespace hf_fastpath
