// bytes_sum: what a word counts for, the same on every device.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define HF_FASTPATH_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define HF_FASTPATH_HOST_DEVICE inline
#endif

namespace hf_fastpath {

constexpr int64_t kSumWordBytes = 8;
constexpr uint64_t kSumFactor = 0x9e3779b97f4a7c15u;  // odd; its multiples are spread over all of 64 bits

// The key of the word at a place.
HF_FASTPATH_HOST_DEVICE uint64_t sum_key(int64_t place) {
  return (static_cast<uint64_t>(place) + 1) * kSumFactor;
}

// What a word adds to the sum: the product of its halves, each with the key's half added, and itself.
HF_FASTPATH_HOST_DEVICE uint64_t summand(uint64_t word, uint64_t key) {
  const uint32_t low = static_cast<uint32_t>(word) + static_cast<uint32_t>(key);
  const uint32_t high = static_cast<uint32_t>(word >> 32) + static_cast<uint32_t>(key >> 32);
  return static_cast<uint64_t>(low) * high + word;
}

// Words of so many bytes, of which the last may have fewer than eight.
HF_FASTPATH_HOST_DEVICE int64_t words_of(int64_t bytes) {
  return (bytes + kSumWordBytes - 1) / kSumWordBytes;
}

// The bytes of a word that has fewer than eight; the others are 0.
HF_FASTPATH_HOST_DEVICE uint64_t word_of(const unsigned char* bytes, int64_t count) {
  uint64_t word = 0;
  for (int64_t i = 0; i < count; ++i) word |= static_cast<uint64_t>(bytes[i]) << (8 * i);
  return word;
}

}  // namespace hf_fastpath
