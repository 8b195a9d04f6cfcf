// read_stream on the CPU: checks, allocation, threads, and the portable kernel. R of a CPU is the size of a
// large buffer over the time of a call, on the pool and with the threads that every other op uses.
#include "read_stream/read_stream_cpu.h"

#include <atomic>

#include "common/cpu_glue.h"
#include "common/cpu_math.h"

namespace hf_fastpath {
namespace {

template <class Word>
uint32_t max_words(const void* data, int64_t count) {
  constexpr Word kMagnitude = static_cast<Word>(~Word{0}) >> 1;  // all bits but the sign
  const Word* words = static_cast<const Word*>(data);
  Word best = 0;
  for (int64_t i = 0; i < count; ++i) best = std::max<Word>(best, words[i] & kMagnitude);
  return best;
}

float value_of(DType dtype, uint32_t bits) {
  if (dtype == DType::kFloat32) return bits_to_float(bits);
  const auto half = static_cast<uint16_t>(bits);
  return dtype == DType::kFloat16 ? to_float(Half{half}) : to_float(BFloat16{half});
}

Tensor read_stream(const Tensor& buffer, int64_t variant) {
  const DType dtype = dtype_of(buffer, "read_stream");
  const int64_t count = buffer.numel();
  STD_TORCH_CHECK(buffer.is_contiguous() && count > 0,
                  "hf_fastpath::read_stream: buffer is not contiguous or empty");
  const void* data = buffer.const_data_ptr();
  const auto kernel = use_avx2() ? max_magnitude_avx2 : max_magnitude_portable;
  const int64_t parts = part_count(count * element_size(dtype), kBytesPerPart);
  std::atomic<uint32_t> best{0};
  for_each_part(parts, [&](int64_t part) {
    const int64_t begin = part_begin(count, parts, part, 64), end = part_begin(count, parts, part + 1, 64);
    const uint32_t mine = kernel(dtype, at(data, begin, dtype), end - begin, variant != 0);
    // Relaxed: the end of parallel_for orders these stores before the load below. The order of the threads
    // does not matter to a maximum.
    uint32_t seen = best.load(std::memory_order_relaxed);
    while (seen < mine && !best.compare_exchange_weak(seen, mine, std::memory_order_relaxed)) {
    }
  });
  Tensor out = torch::stable::empty({1}, ScalarType::Float);
  *static_cast<float*>(out.mutable_data_ptr()) = value_of(dtype, best.load(std::memory_order_relaxed));
  return out;
}

HF_FASTPATH_KERNEL(CPU, "read_stream", read_stream)

}  // namespace

uint32_t max_magnitude_portable(DType dtype, const void* data, int64_t count, bool) {
  return dtype == DType::kFloat32 ? max_words<uint32_t>(data, count) : max_words<uint16_t>(data, count);
}

}  // namespace hf_fastpath
