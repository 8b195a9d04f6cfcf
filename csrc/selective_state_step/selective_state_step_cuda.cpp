// torch.ops.hf_fastpath.selective_state_step on a GPU: see hf_fastpath/ops/selective_state_step.py for the
// contract.
#include "common/cuda_glue.h"
#include "selective_state_step/selective_state_step.h"
#include "selective_state_step/selective_state_step_glue.h"

namespace hf_fastpath {

Tensor selective_state_step_cuda(const Tensor& x, const Tensor& dt, const Tensor& a_log, const Tensor& b,
                                 const Tensor& c, const Tensor& state, const std::optional<Tensor>& d,
                                 const std::optional<Tensor>& dt_bias, const std::optional<Tensor>& z,
                                 int64_t tokens) {
  const DeviceGuard guard(x);
  const SelectiveStateCall call(x, dt, a_log, b, c, state, d, dt_bias, z, tokens);
  if (call.out.numel() > 0) launch_selective_state_step(call.params, current_stream(guard.device()));
  return call.out;
}

STABLE_TORCH_LIBRARY_IMPL(hf_fastpath, CUDA, m) {
  m.impl("selective_state_step", TORCH_BOX(&selective_state_step_cuda));
}

}  // namespace hf_fastpath
