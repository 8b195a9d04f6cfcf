// What: a channel's state S becomes decay S + t x b, and S . c is returned: all float32.
// Work split: the glue gives every thread a range of channels; a vector holds eight elements of a state.
// Traffic: the state once in each direction; for Mamba-1 a_log, too.
// Roofline: memory bandwidth for Mamba-2, arithmetic (two exp an element) for Mamba-1.
#include "common/avx2_math.h"
#include "selective_state_step/selective_state_step_cpu.h"

namespace hf_fastpath {
namespace {

// `decay_of(n, count)`: the decays of `count` elements from element n on.
template <class Decay>
HF_INLINE float run_channel(const SelectiveChannel& channel, const Decay& decay_of) {
  const __m256 added = _mm256_set1_ps(channel.added);
  __m256 sum = _mm256_setzero_ps();
  int64_t n = 0;
  for (; n + kLanes <= channel.state_size; n += kLanes) {
    const __m256 more = _mm256_mul_ps(added, _mm256_loadu_ps(channel.b + n));
    const __m256 state = _mm256_fmadd_ps(decay_of(n, kLanes), _mm256_loadu_ps(channel.state + n), more);
    _mm256_storeu_ps(channel.state + n, state);
    sum = _mm256_fmadd_ps(state, _mm256_loadu_ps(channel.c + n), sum);
  }
  if (n < channel.state_size) {
    const int64_t rest = channel.state_size - n;
    const __m256 more = _mm256_mul_ps(added, F32::load(channel.b + n, rest));
    const __m256 state = _mm256_fmadd_ps(decay_of(n, rest), F32::load(channel.state + n, rest), more);
    F32::store(channel.state + n, state, rest);
    sum = _mm256_fmadd_ps(state, F32::load(channel.c + n, rest), sum);
  }
  return horizontal_sum(sum);
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
