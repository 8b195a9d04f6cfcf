// selective_state_step on the CPU: threads, the values that a channel has one of, and the portable kernel.
#include "selective_state_step/selective_state_step_cpu.h"

#include <algorithm>
#include <type_traits>

#include "common/convert_cpu.h"
#include "common/cpu_glue.h"
#include "common/cpu_math.h"
#include "common/heads_cpu.h"
#include "selective_state_step/selective_state_step_glue.h"

namespace hf_fastpath {

float selective_channel_portable(const SelectiveChannel& channel) {
  const Parameter rates{channel.a_log, channel.a_log_dtype};
  double sum = 0.0;
  for (int64_t n = 0; n < channel.state_size; ++n) {
    const float decay = rates.data == nullptr
                            ? channel.decay
                            : static_cast<float>(std::exp(-channel.step * std::exp(load(rates, n))));
    channel.state[n] = decay * channel.state[n] + channel.added * channel.b[n];
    sum += double(channel.state[n]) * channel.c[n];
  }
  return static_cast<float>(sum);
}

namespace {

// Channels [begin, end) of all heads of all sequences, in order; of each head's channels all tokens.
template <class T>
void run_channels(const SelectiveStateParams& p, int64_t begin, int64_t end) {
  const bool avx2 = use_avx2();
  const auto convert = avx2 ? convert_to_float_avx2 : convert_to_float_portable;
  const auto kernel = avx2 ? selective_channel_avx2 : selective_channel_portable;
  float* b = scratch(2 * p.state_size);
  float* c = b + p.state_size;
  SelectiveChannel channel{};
  channel.b = b, channel.c = c, channel.state_size = p.state_size;
  const auto run_token = [&](int64_t row, int64_t head_of_all, int64_t first, int64_t last) {
    const int64_t head = head_of_all % p.heads, group = head / (p.heads / p.groups);
    const auto at_head = [&](const Heads& from, int64_t of) { return head_of<T>(from, row, of); };
    convert(p.dtype, at_head(p.b, group), b, p.state_size);
    convert(p.dtype, at_head(p.c, group), c, p.state_size);
    double step = 0.0;
    for (int64_t element = first; element < last; ++element) {
      const int64_t parameter = p.per_channel ? head * p.head_dim + element : head;
      if (element == first || p.per_channel) {
        const double bias = p.dt_bias.data != nullptr ? load(p.dt_bias, parameter) : 0.0;
        step = softplus(to_float(at_head(p.dt, head)[p.per_channel ? element : 0]) + bias);
        channel.step = static_cast<float>(step);
        if (p.per_channel) {
          const int64_t rates = parameter * p.state_size;
          channel.a_log = at(p.a_log.data, rates, p.a_log.dtype), channel.a_log_dtype = p.a_log.dtype;
        } else {
          channel.decay = static_cast<float>(std::exp(-step * std::exp(load(p.a_log, head))));
        }
      }
      const float x = to_float(at_head(p.x, head)[element]);
      channel.state = p.state + (head_of_all * p.head_dim + element) * p.state_size;
      channel.added = static_cast<float>(step * x);
      double y = kernel(channel);
      if (p.d.data != nullptr) y += load(p.d, parameter) * x;
      if (p.z.data != nullptr) {
        const double z = to_float(at_head(p.z, head)[element]);
        y *= z / (1.0 + std::exp(-z));
      }
      T* out = static_cast<T*>(p.out) + (row * p.heads + head) * p.head_dim;
      from_float(static_cast<float>(y), out + element);
    }
  };
  for (int64_t i = begin; i < end;) {
    const int64_t head_of_all = i / p.head_dim, first = i % p.head_dim;
    const int64_t count = std::min(end - i, p.head_dim - first);
    const int64_t first_row = head_of_all / p.heads * p.tokens;
    for (int64_t row = first_row; row < first_row + p.tokens; ++row) {
      run_token(row, head_of_all, first, first + count);
    }
    i += count;
  }
}

}  // namespace

Tensor selective_state_step_cpu(const Tensor& x, const Tensor& dt, const Tensor& a_log, const Tensor& b,
                                const Tensor& c, const Tensor& state, const std::optional<Tensor>& d,
                                const std::optional<Tensor>& dt_bias, const std::optional<Tensor>& z,
                                int64_t tokens) {
  const SelectiveStateCall call(x, dt, a_log, b, c, state, d, dt_bias, z, tokens);
  const SelectiveStateParams& p = call.params;
  const int64_t channels = p.batch * p.heads * p.head_dim;
  for_each_range(
      channels, 2 * sizeof(float) * channels * p.tokens * p.state_size, [&](int64_t begin, int64_t end) {
        with_storage(p.dtype,
                     [&](auto* tag) { run_channels<std::remove_pointer_t<decltype(tag)>>(p, begin, end); });
      });
  return call.out;
}

HF_FASTPATH_KERNEL(CPU, "selective_state_step", selective_state_step_cpu)

}  // namespace hf_fastpath
