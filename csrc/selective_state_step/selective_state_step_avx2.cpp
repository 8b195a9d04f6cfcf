// What: a channel's state S becomes decay S + t x b, and S . c is returned: all float32.
// Work split: the glue gives every thread a range of channels; a vector holds eight elements of a state.
// Traffic: the state once in each direction; for Mamba-1 a_log, too.
// Roofline: memory bandwidth for Mamba-2, arithmetic (two exp an element) for Mamba-1.
#include "common/avx2_math.h"
#include "selective_state_step/selective_state_step_cpu.h"

namespace hf_fastpath {
namespace {

// Sums that take turns: a long sum has fewer roundings in each.
constexpr int kSums = 4;

// `decay_of(n, count)`: the decays of `count` elements from element n on.
template <class Decay>
HF_INLINE float run_channel(const SelectiveChannel& channel, const Decay& decay_of) {
  const __m256 added = _mm256_set1_ps(channel.added);
  __m256 sums[kSums];
  for (__m256& sum : sums) sum = _mm256_setzero_ps();
  const auto step = [&](int64_t n, int64_t count, auto load, auto store, __m256& sum) {
    const __m256 more = _mm256_mul_ps(added, load(channel.b + n));
    const __m256 state = _mm256_fmadd_ps(decay_of(n, count), load(channel.state + n), more);
    store(channel.state + n, state);
    sum = _mm256_fmadd_ps(state, load(channel.c + n), sum);
  };
  const auto load = [](const float* from) { return _mm256_loadu_ps(from); };
  const auto store = [](float* to, __m256 value) { _mm256_storeu_ps(to, value); };
  int64_t n = 0;
  for (; n + kSums * kLanes <= channel.state_size; n += kSums * kLanes) {
    for (int i = 0; i < kSums; ++i) step(n + i * kLanes, kLanes, load, store, sums[i]);
  }
  for (; n + kLanes <= channel.state_size; n += kLanes) step(n, kLanes, load, store, sums[0]);
  if (const int64_t rest = channel.state_size - n; rest > 0) {
    const auto load_rest = [=](const float* from) { return F32::load(from, rest); };
    const auto store_rest = [=](float* to, __m256 value) { F32::store(to, value, rest); };
    step(n, rest, load_rest, store_rest, sums[1]);
  }
  return horizontal_sum(_mm256_add_ps(_mm256_add_ps(sums[0], sums[1]), _mm256_add_ps(sums[2], sums[3])));
}

}  // namespace

float selective_channel_avx2(const SelectiveChannel& channel) {
  if (channel.a_log == nullptr) {
    const __m256 decay = _mm256_set1_ps(channel.decay);
    return run_channel(channel, [=](int64_t, int64_t) { return decay; });
  }
  float result = 0.0f;
  with_element(channel.a_log_dtype, [&](auto element) {
    using Element = decltype(element);
    const auto* rates = static_cast<const typename Element::Storage*>(channel.a_log);
    const __m256 step = _mm256_set1_ps(-channel.step);
    result = run_channel(channel, [=](int64_t n, int64_t count) {
      const __m256 rate = count == kLanes ? Element::load(rates + n) : Element::load(rates + n, count);
      return exp_ps(_mm256_mul_ps(step, exp_ps(rate)));
    });
  });
  return result;
}

}  // namespace hf_fastpath
