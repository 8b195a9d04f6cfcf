// What: sum over words of 64 bits, each with its halves mixed and times the factor of its place, modulo 2^64.
// Work split: one thread; sixteen sums side by side, which the compiler makes vectors of.
// Traffic: every byte once.
// Roofline: memory, where a product of 64 bits takes a few instructions. Figures: docs/lab/ops.md.
#include "bytes_sum/bytes_sum_cpu.h"
#include "bytes_sum/bytes_sum_loop.h"

namespace hf_fastpath {

uint64_t sum_words_avx2(const void* data, int64_t words, int64_t place) {
  return sum_words(data, words, place);
}

}  // namespace hf_fastpath
