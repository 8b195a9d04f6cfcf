// torch.ops.hf_fastpath.selective_state_step on a GPU: see hf_fastpath/ops/selective_state_step.py for the
// contract.
#include "common/cuda_glue.h"
#include "selective_state_step/selective_state_step.h"
#include "selective_state_step/selective_state_step_glue.h"

namespace hf_fastpath {
namespace {

// Launches what computes the tokens of each sequence. Larger states than any model has go through memory,
// token by token.
void launch_steps(const SelectiveStateParams& p, cudaStream_t stream) {
  if (p.tokens == 1) return launch_selective_state_step(p, stream);
  if (p.state_size <= kMaxWalkedState) return launch_selective_state_walk(p, stream);
  const int64_t size = element_size(p.dtype);
  const auto at = [&](const Heads& heads, int64_t row) {
    const int64_t bytes = row * heads.batch_stride * size;
    return Heads{heads.data ? static_cast<const char*>(heads.data) + bytes : nullptr, 0, heads.head_stride};
  };
  for (int64_t row = 0; row < p.batch * p.tokens; ++row) {
    SelectiveStateParams one = p;
    one.batch = one.tokens = 1;
    one.x = at(p.x, row), one.dt = at(p.dt, row), one.z = at(p.z, row);
    one.b = at(p.b, row), one.c = at(p.c, row);
    one.state = p.state + row / p.tokens * p.heads * p.head_dim * p.state_size;
    one.out = static_cast<char*>(p.out) + row * p.heads * p.head_dim * size;
    launch_selective_state_step(one, stream);
  }
}

}  // namespace

Tensor selective_state_step_cuda(const Tensor& x, const Tensor& dt, const Tensor& a_log, const Tensor& b,
                                 const Tensor& c, const Tensor& state, const std::optional<Tensor>& d,
                                 const std::optional<Tensor>& dt_bias, const std::optional<Tensor>& z,
                                 int64_t tokens) {
  const DeviceGuard guard(x);
  const SelectiveStateCall call(x, dt, a_log, b, c, state, d, dt_bias, z, tokens);
  if (call.out.numel() > 0) launch_steps(call.params, current_stream(guard.device()));
  return call.out;
}

HF_FASTPATH_KERNEL(CUDA, "selective_state_step", selective_state_step_cuda)

}  // namespace hf_fastpath
