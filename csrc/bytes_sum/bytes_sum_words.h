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

// The factor of the word at a place, of kSumFactor times one more than the place: odd, so that a word that is
// another one makes another product.
HF_FASTPATH_HOST_DEVICE uint64_t sum_factor(uint64_t multiple) { return (multiple ^ (multiple >> 32)) | 1; }

// What a word adds to the sum. Its upper half is mixed into the lower one: a product's high bits alone would
// tell of it, and only the low bits of the factor would count.
HF_FASTPATH_HOST_DEVICE uint64_t summand(uint64_t word, uint64_t multiple) {
  return (word ^ (word >> 32)) * sum_factor(multiple);
}

HF_FASTPATH_HOST_DEVICE uint64_t sum_multiple(int64_t place) {
  return (static_cast<uint64_t>(place) + 1) * kSumFactor;
}

// The bytes of a word that has fewer than eight; the others are 0.
HF_FASTPATH_HOST_DEVICE uint64_t word_of(const unsigned char* bytes, int64_t count) {
  uint64_t word = 0;
  for (int64_t i = 0; i < count; ++i) word |= static_cast<uint64_t>(bytes[i]) << (8 * i);
  return word;
}

}  // namespace hf_fastpath
