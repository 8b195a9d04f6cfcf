// gated_delta_step on the CPU: threads, gates and norms, and the portable kernel. Gates and norms are a few
// numbers a head, so they are scalar and float64.
#include "gated_delta_step/gated_delta_step_cpu.h"

#include <type_traits>

#include "common/convert_cpu.h"
#include "common/cpu_glue.h"
#include "common/cpu_math.h"
#include "common/heads_cpu.h"
#include "gated_delta_step/gated_delta_step_glue.h"

namespace hf_fastpath {

void gated_delta_head_portable(const GatedDeltaHead& h) {
  double overlap = 0.0;
  for (int64_t r = 0; r < h.k_dim; ++r) overlap += double(h.q[r]) * h.k[r];
  for (int64_t c = 0; c < h.v_dim; ++c) {
    float* column = h.state + c;
    double known = 0.0, read = 0.0;
    for (int64_t r = 0; r < h.k_dim; ++r) {
      const float decayed = h.decay[r] * column[r * h.v_dim];
      known += double(h.k[r]) * decayed;
      read += double(h.q[r]) * decayed;
    }
    const double delta = h.beta * (h.v[c] - known);
    h.v[c] = static_cast<float>(read + overlap * delta);
    for (int64_t r = 0; r < h.k_dim; ++r) {
      column[r * h.v_dim] = static_cast<float>(h.decay[r] * column[r * h.v_dim] + h.k[r] * delta);
    }
  }
}

namespace {

void normalize(float* x, int64_t count, bool l2_norm, double scale) {
  double squares = kL2Eps;
  for (int64_t i = 0; i < count; ++i) squares += double(x[i]) * x[i];
  const double factor = l2_norm ? scale / std::sqrt(squares) : scale;
  for (int64_t i = 0; i < count; ++i) x[i] = static_cast<float>(x[i] * factor);
}

// Heads [begin, end) of all sequences, in order; of each head all tokens.
template <class T>
void run_heads(const GatedDeltaParams& p, int64_t begin, int64_t end) {
  const bool avx2 = use_avx2();
  const auto convert = avx2 ? convert_to_float_avx2 : convert_to_float_portable;
  const auto kernel = avx2 ? gated_delta_head_avx2 : gated_delta_head_portable;
  float* q = scratch(3 * p.k_dim + 3 * p.v_dim);
  float *k = q + p.k_dim, *decay = k + p.k_dim, *v = decay + p.k_dim, *sums = v + p.v_dim;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t head = i % p.v_heads, k_head = head / (p.v_heads / p.k_heads);
    const int64_t first_row = i / p.v_heads * p.tokens;
    const double rate = std::exp(load(p.a_log, head));
    for (int64_t row = first_row; row < first_row + p.tokens; ++row) {
      const auto fetch = [&](const Heads& from, int64_t of, int64_t count, float* to) {
        convert(p.dtype, head_of<T>(from, row, of), to, count);
      };
      fetch(p.q, k_head, p.k_dim, q);
      fetch(p.k, k_head, p.k_dim, k);
      fetch(p.v, head, p.v_dim, v);
      normalize(q, p.k_dim, p.l2_norm, p.scale);
      normalize(k, p.k_dim, p.l2_norm, 1.0);
      for (int64_t r = 0; r < p.k_dim; ++r) {
        if (r > 0 && !p.per_element) {
          decay[r] = decay[0];
          continue;
        }
        const double a = to_float(head_of<T>(p.a, row, head)[r]) +
                         load(p.dt_bias, p.per_element ? head * p.k_dim + r : head);
        decay[r] = static_cast<float>(std::exp(-rate * softplus(a)));
      }
      const double beta = p.beta_scale / (1.0 + std::exp(-double(to_float(*head_of<T>(p.b, row, head)))));
      kernel({p.state + i * p.k_dim * p.v_dim, decay, k, q, static_cast<float>(beta), v, sums, p.k_dim,
              p.v_dim});
      T* out = static_cast<T*>(p.out) + (row * p.v_heads + head) * p.v_dim;
      for (int64_t c = 0; c < p.v_dim; ++c) from_float(v[c], out + c);
    }
  }
}

}  // namespace

Tensor gated_delta_step_cpu(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& a,
                            const Tensor& b, const Tensor& a_log, const Tensor& dt_bias, const Tensor& state,
                            double scale, bool l2_norm, double beta_scale, bool programmatic_launch,
                            int64_t tokens) {
  const GatedDeltaCall call(q, k, v, a, b, a_log, dt_bias, state, scale, l2_norm, beta_scale,
                            programmatic_launch, tokens);
  const GatedDeltaParams& p = call.params;
  const int64_t heads = p.batch * p.v_heads;
  for_each_range(
      heads, 2 * sizeof(float) * heads * p.tokens * p.k_dim * p.v_dim, [&](int64_t begin, int64_t end) {
        with_storage(p.dtype,
                     [&](auto* tag) { run_heads<std::remove_pointer_t<decltype(tag)>>(p, begin, end); });
      });
  return call.out;
}

HF_FASTPATH_KERNEL(CPU, "gated_delta_step", gated_delta_step_cpu)

}  // namespace hf_fastpath
