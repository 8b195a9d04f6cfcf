// torch.ops.hf_fastpath.gated_rms_norm on a GPU: see hf_fastpath/ops/gated_rms_norm.py for the contract.
#include "common/cuda_glue.h"
#include "gated_rms_norm/gated_rms_norm.h"
#include "gated_rms_norm/gated_rms_norm_glue.h"

namespace hf_fastpath {

Tensor gated_rms_norm_cuda(const Tensor& x, const Tensor& gate, const Tensor& weight, double eps,
                           int64_t groups, bool gate_first, int64_t activation, bool programmatic_launch) {
  const DeviceGuard guard(x);
  const GatedRmsNormCall call(x, gate, weight, eps, groups, gate_first, activation, programmatic_launch);
  if (call.out.numel() > 0) launch_gated_rms_norm(call.params, current_stream(guard.device()));
  return call.out;
}

HF_FASTPATH_KERNEL(CUDA, "gated_rms_norm", gated_rms_norm_cuda)

}  // namespace hf_fastpath
