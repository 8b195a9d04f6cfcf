// bytes_sum on the CPU: checks, threads, and the portable kernel.
#include "bytes_sum/bytes_sum_cpu.h"

#include <atomic>

#include "bytes_sum/bytes_sum_glue.h"
#include "common/cpu_glue.h"

namespace hf_fastpath {
namespace {

Tensor bytes_sum(const std::vector<Tensor>& tensors) {
  const std::vector<SummedBytes> spans = summed_bytes(tensors);
  const auto kernel = use_avx2() ? sum_words_avx2 : sum_words_portable;
  std::atomic<uint64_t> sum{0};
  for (const SummedBytes& span : spans) {
    const int64_t words = span.bytes / kSumWordBytes, rest = span.bytes % kSumWordBytes;
    const unsigned char* bytes = static_cast<const unsigned char*>(span.data);
    const int64_t parts = part_count(span.bytes, kBytesPerPart);
    for_each_part(parts, [&](int64_t part) {
      const int64_t begin = part_begin(words, parts, part, 64), end = part_begin(words, parts, part + 1, 64);
      // Relaxed: the end of parallel_for orders these, and the order does not matter to a sum of integers.
      sum.fetch_add(kernel(bytes + begin * kSumWordBytes, end - begin, span.place + begin),
                    std::memory_order_relaxed);
    });
    if (rest > 0) {
      const uint64_t word = word_of(bytes + words * kSumWordBytes, rest);
      sum.fetch_add(summand(word, sum_key(span.place + words)), std::memory_order_relaxed);
    }
  }
  Tensor out = empty_sum(tensors[0]);
  *static_cast<int64_t*>(out.mutable_data_ptr()) = static_cast<int64_t>(sum.load(std::memory_order_relaxed));
  return out;
}

HF_FASTPATH_KERNEL(CPU, "bytes_sum", bytes_sum)

}  // namespace

uint64_t sum_words_portable(const void* data, int64_t words, int64_t place) {
  const unsigned char* bytes = static_cast<const unsigned char*>(data);
  uint64_t sum = 0, key = sum_key(place);
  for (int64_t i = 0; i < words; ++i, key += kSumFactor) {
    uint64_t word;
    std::memcpy(&word, bytes + i * kSumWordBytes, sizeof word);
    sum += summand(word, key);
  }
  return sum;
}

}  // namespace hf_fastpath
