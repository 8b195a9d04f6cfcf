// exponential_race on the CPU: partial sorts of (value, index), so that work is linear in the vocabulary.
#include <atomic>
#include <cmath>

#include "common/cpu_glue.h"
#include "common/cpu_math.h"
#include "exponential_race/exponential_race_glue.h"

namespace hf_fastpath {
namespace {

// A logit and its place in one integer: in ascending order as a stable sort by value leaves them, NaN last.
uint64_t item_of(float logit, int64_t index) {
  const uint32_t bits = logit != logit ? 0x7fc00000u : float_to_bits(logit + 0.0f);  // -0 equals 0
  return uint64_t(bits & 0x80000000u ? ~bits : bits | 0x80000000u) << 32 | static_cast<uint32_t>(index);
}

uint32_t key_of(uint64_t item) { return static_cast<uint32_t>(item >> 32); }

float value_of(uint64_t item) {
  const uint32_t key = key_of(item);
  return bits_to_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// One row; `begin` to `end` are its items in any order and are left in another one. False if softmax of the
// row is undefined.
bool race(uint64_t* begin, uint64_t* end, const double* settings, const float* noise, float* out) {
  const int64_t vocab_size = end - begin;
  const float temperature = static_cast<float>(settings[0]),
              min_p = std::min(static_cast<float>(settings[3]), 1.0f);
  const int64_t top_k = static_cast<int64_t>(settings[1]);
  const double top_p = settings[2];
  const float largest = value_of(*std::max_element(begin, end));
  if (!std::isfinite(largest)) return false;
  const auto weight = [&](uint64_t item) { return std::exp((value_of(item) - largest) / temperature); };

  if (top_k > 0 && top_k < vocab_size) {
    uint64_t* kth = end - top_k;
    std::nth_element(begin, kth, end);
    const uint32_t least = key_of(*kth);
    begin = std::partition(begin, kth, [&](uint64_t item) { return key_of(item) < least; });
  }
  if (top_p < 1) {
    const auto mass = [&](const uint64_t* from, const uint64_t* to) {
      double sum = 0;
      for (; from < to; ++from) sum += weight(*from);
      return sum;
    };
    double removable = (1 - top_p) * mass(begin, end);
    for (uint64_t* stop = end; stop - begin > 1;) {  // the first item to keep is in [begin, stop)
      uint64_t* middle = begin + (stop - begin) / 2;
      std::nth_element(begin, middle, stop);
      const double lower = mass(begin, middle);
      if (lower <= removable) {
        begin = middle, removable -= lower;
      } else {
        stop = middle;
      }
    }
  }
  std::fill_n(out, vocab_size, 0.0f);
  for (const uint64_t* item = begin; item < end; ++item) {
    const float w = weight(*item);
    const uint32_t index = static_cast<uint32_t>(*item);
    if (w > 0 && w >= min_p) out[index] = w / noise[index];
  }
  return true;
}

Tensor exponential_race(const Tensor& logits, const Tensor& noise, const Tensor& settings,
                        bool programmatic_launch) {
  const ExponentialRaceCall call(logits, noise, settings, programmatic_launch);
  const ExponentialRaceParams& p = call.params;
  std::atomic<bool> defined{true};
  for_each_range(p.rows, 8 * p.rows * p.vocab_size, [&](int64_t begin, int64_t end) {
    uint64_t* items = reinterpret_cast<uint64_t*>(scratch(2 * p.vocab_size));
    for (int64_t row = begin; row < end; ++row) {
      with_storage(p.dtype, [&](auto* tag) {
        using T = std::remove_pointer_t<decltype(tag)>;
        const T* values = static_cast<const T*>(p.logits) + row * p.stride;
        for (int64_t i = 0; i < p.vocab_size; ++i) items[i] = item_of(to_float(values[i]), i);
      });
      float* out = p.out + row * p.vocab_size;
      if (!race(items, items + p.vocab_size, p.settings, p.noise + row * p.vocab_size, out)) defined = false;
    }
  });
  STD_TORCH_CHECK(defined, "hf_fastpath::exponential_race: a row of logits holds inf or nan, or only -inf");
  return call.out;
}

}  // namespace

HF_FASTPATH_KERNEL(CPU, "exponential_race", exponential_race)

}  // namespace hf_fastpath
