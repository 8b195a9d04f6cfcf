// bytes_sum on the CPU: kernel interface, free of torch.
#pragma once

#include <cstdint>

namespace hf_fastpath {

// The sum over `words` words from `data` on, of which the first has the place `place`.
uint64_t sum_words_portable(const void* data, int64_t words, int64_t place);
uint64_t sum_words_avx2(const void* data, int64_t words, int64_t place);

}  // namespace hf_fastpath
