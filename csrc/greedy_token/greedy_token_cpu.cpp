// greedy_token on the CPU: a row is a few microseconds of one core's bandwidth.
#include "greedy_token/greedy_token_cpu.h"

#include <algorithm>

#include "common/cpu_glue.h"
#include "common/cpu_math.h"
#include "greedy_token/greedy_token_glue.h"

namespace hf_fastpath {
namespace {

template <class T>
int64_t argmax(DType dtype, const T* values, int64_t count) {
  const int64_t index = use_avx2() && count > 0 ? argmax_avx2(dtype, values, count) : -1;
  if (index >= 0) return index;
  uint64_t best = 0;
  for (int64_t i = 0; i < count; ++i) best = std::max(best, preference(to_float(values[i]), i));
  return preferred_index(best);
}

void greedy_token(const Tensor& logits, Tensor unfinished, Tensor tokens, Tensor positions, Tensor seq_lens,
                  Tensor record, const std::optional<Tensor>& eos_tokens,
                  const std::optional<Tensor>& pad_token, bool programmatic_launch) {
  const GreedyTokenCall call(logits, unfinished, tokens, positions, seq_lens, record, eos_tokens, pad_token,
                             programmatic_launch);
  const GreedyTokenParams& p = call.params;
  with_storage(p.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    for (int row = 0; row < p.batch; ++row) {
      const T* values = static_cast<const T*>(p.logits) + row * p.stride;
      const TokenState state = token_state(p, row);
      const int64_t token = taken_token(p, state, argmax(p.dtype, values, p.vocab_size));
      const bool ends =
          std::find(p.eos_tokens, p.eos_tokens + p.num_eos_tokens, token) != p.eos_tokens + p.num_eos_tokens;
      take_token(p, row, state, token, ends);
    }
  });
}

HF_FASTPATH_KERNEL(CPU, "greedy_token", greedy_token)

}  // namespace
}  // namespace hf_fastpath
