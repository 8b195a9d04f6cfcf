// What: one head's state S becomes g S + k (beta (v - k^T g S))^T, and the result is q^T S: all float32.
// Work split: the glue gives every thread a range of heads. A first pass over the state sums k^T g S and
//   q^T g S, eight rows at a time; the result follows from the two sums and q.k, so that the second pass only
//   writes.
// Traffic: the state is read from memory once and written once; the second pass finds it in L2.
// Roofline: memory bandwidth.
#include "common/avx2_math.h"
#include "gated_delta_step/gated_delta_step_cpu.h"

namespace hf_fastpath {
namespace {

// Rows of the state at once: the sums are loaded and stored once for so many, and what is added to them is a
// sum of so many products, which keeps rounding errors small.
constexpr int64_t kRows = 8;

// Adds kCount rows of the state to the sums.
template <int64_t kCount>
HF_INLINE void add_rows(const GatedDeltaHead& h, int64_t first) {
  float *known = h.sums, *read = h.sums + h.v_dim;
  const float* rows = h.state + first * h.v_dim;
  float k[kCount], q[kCount];
  for (int64_t r = 0; r < kCount; ++r) {
    k[r] = h.decay[first + r] * h.k[first + r];
    q[r] = h.decay[first + r] * h.q[first + r];
  }
  for (int64_t c = 0; c < h.v_dim; c += kLanes) {
    const int64_t count = min_of(kLanes, h.v_dim - c);
    const auto load = [=](const float* from) {
      return count == kLanes ? _mm256_loadu_ps(from) : F32::load(from, count);
    };
    __m256 of_k = _mm256_setzero_ps(), of_q = _mm256_setzero_ps();
    for (int64_t r = 0; r < kCount; ++r) {
      const __m256 values = load(rows + r * h.v_dim + c);
      of_k = _mm256_fmadd_ps(_mm256_broadcast_ss(k + r), values, of_k);
      of_q = _mm256_fmadd_ps(_mm256_broadcast_ss(q + r), values, of_q);
    }
    of_k = _mm256_add_ps(of_k, load(known + c)), of_q = _mm256_add_ps(of_q, load(read + c));
    if (count == kLanes) {
      _mm256_storeu_ps(known + c, of_k), _mm256_storeu_ps(read + c, of_q);
    } else {
      F32::store(known + c, of_k, count), F32::store(read + c, of_q, count);
    }
  }
}

}  // namespace

void gated_delta_head_avx2(const GatedDeltaHead& h) {
  float *known = h.sums, *read = h.sums + h.v_dim;
  for (int64_t c = 0; c < 2 * h.v_dim; ++c) h.sums[c] = 0.0f;
  int64_t r = 0;
  for (; r + kRows <= h.k_dim; r += kRows) add_rows<kRows>(h, r);
  for (; r < h.k_dim; ++r) add_rows<1>(h, r);
  double overlap = 0.0;
  for (r = 0; r < h.k_dim; ++r) overlap += double(h.q[r]) * h.k[r];
  for (int64_t c = 0; c < h.v_dim; ++c) {
    const float delta = h.beta * (h.v[c] - known[c]);
    known[c] = delta;
    h.v[c] = read[c] + static_cast<float>(overlap) * delta;
  }
  for (r = 0; r < h.k_dim; ++r) {
    float* row = h.state + r * h.v_dim;
    const __m256 decay = _mm256_set1_ps(h.decay[r]), k = _mm256_set1_ps(h.k[r]);
    int64_t c = 0;
    for (; c + kLanes <= h.v_dim; c += kLanes) {
      const __m256 added = _mm256_mul_ps(k, _mm256_loadu_ps(known + c));
      _mm256_storeu_ps(row + c, _mm256_fmadd_ps(decay, _mm256_loadu_ps(row + c), added));
    }
    if (c == h.v_dim) continue;
    const int64_t rest = h.v_dim - c;
    const __m256 added = _mm256_mul_ps(k, F32::load(known + c, rest));
    F32::store(row + c, _mm256_fmadd_ps(decay, F32::load(row + c, rest), added), rest);
  }
}

}  // namespace hf_fastpath
