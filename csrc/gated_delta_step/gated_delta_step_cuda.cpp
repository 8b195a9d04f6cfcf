// torch.ops.hf_fastpath.gated_delta_step on a GPU: see hf_fastpath/ops/gated_delta_step.py for the contract.
#include "common/cuda_glue.h"
#include "gated_delta_step/gated_delta_step.h"
#include "gated_delta_step/gated_delta_step_glue.h"

namespace hf_fastpath {

Tensor gated_delta_step_cuda(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& a,
                             const Tensor& b, const Tensor& a_log, const Tensor& dt_bias, const Tensor& state,
                             double scale, bool l2_norm, double beta_scale, bool programmatic_launch,
                             int64_t tokens) {
  const DeviceGuard guard(q);
  const GatedDeltaCall call(q, k, v, a, b, a_log, dt_bias, state, scale, l2_norm, beta_scale,
                            programmatic_launch, tokens);
  const auto launch = call.params.tokens > 1 ? launch_gated_delta_walk : launch_gated_delta_step;
  if (call.out.numel() > 0) launch(call.params, current_stream(guard.device()));
  return call.out;
}

HF_FASTPATH_KERNEL(CUDA, "gated_delta_step", gated_delta_step_cuda)

}  // namespace hf_fastpath
