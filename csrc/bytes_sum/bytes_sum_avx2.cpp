// What: sum over words of 64 bits of what each adds at its place (bytes_sum_words.h), modulo 2^64.
// Work split: one thread; four vectors of sums, so that none waits for the one before it.
// Traffic: every byte once; six instructions for 32 bytes.
// Roofline: memory. Figures: docs/lab/ops.md.
#include <immintrin.h>

#include "bytes_sum/bytes_sum_cpu.h"
#include "bytes_sum/bytes_sum_words.h"

namespace hf_fastpath {

uint64_t sum_words_avx2(const void* data, int64_t words, int64_t place) {
  constexpr int kVectors = 4, kLanes = 4;
  constexpr int64_t kStep = int64_t(kVectors) * kLanes;
  const unsigned char* bytes = static_cast<const unsigned char*>(data);
  __m256i sums[kVectors], keys[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    alignas(32) uint64_t first[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) first[lane] = sum_key(place + v * kLanes + lane);
    sums[v] = _mm256_setzero_si256();
    keys[v] = _mm256_load_si256(reinterpret_cast<const __m256i*>(first));
  }
  const __m256i next = _mm256_set1_epi64x(static_cast<int64_t>(kStep * kSumFactor));
  int64_t i = 0;
  for (; i + kStep <= words; i += kStep) {
    for (int v = 0; v < kVectors; ++v) {
      const auto* address = reinterpret_cast<const __m256i*>(bytes + (i + v * kLanes) * kSumWordBytes);
      const __m256i word = _mm256_loadu_si256(address), keyed = _mm256_add_epi32(word, keys[v]);
      const __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
      sums[v] = _mm256_add_epi64(sums[v], _mm256_add_epi64(product, word));
      keys[v] = _mm256_add_epi64(keys[v], next);
    }
  }
  uint64_t sum = 0;
  for (const __m256i& each : sums) {
    alignas(32) uint64_t lanes[kLanes];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), each);
    for (const uint64_t lane : lanes) sum += lane;
  }
  return sum + sum_words_portable(bytes + i * kSumWordBytes, words - i, place + i);
}

}  // namespace hf_fastpath
