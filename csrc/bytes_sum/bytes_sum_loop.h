// The loop of bytes_sum over words of one thread, for every set of instructions.
#pragma once

#include "bytes_sum/bytes_sum_words.h"

namespace hf_fastpath {

inline uint64_t sum_words(const void* data, int64_t words, int64_t place) {
  constexpr int kLanes = 16;
  const unsigned char* bytes = static_cast<const unsigned char*>(data);
  uint64_t sums[kLanes] = {}, multiples[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) multiples[lane] = sum_multiple(place + lane);
  int64_t i = 0;
  for (; i + kLanes <= words; i += kLanes) {
    uint64_t taken[kLanes];
    std::memcpy(taken, bytes + i * kSumWordBytes, sizeof taken);
    for (int lane = 0; lane < kLanes; ++lane) {
      sums[lane] += summand(taken[lane], multiples[lane]);
      multiples[lane] += kLanes * kSumFactor;
    }
  }
  uint64_t sum = 0;
  for (const uint64_t each : sums) sum += each;
  for (; i < words; ++i) {
    sum += summand(word_of(bytes + i * kSumWordBytes, kSumWordBytes), sum_multiple(place + i));
  }
  return sum;
}

}  // namespace hf_fastpath
