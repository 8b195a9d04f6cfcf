// torch.ops.hf_fastpath.router_logits on a GPU: see hf_fastpath/ops/router_logits.py for the contract.
#include "common/cuda_glue.h"
#include "router_logits/router_logits.h"
#include "router_logits/router_logits_glue.h"

namespace hf_fastpath {

Tensor router_logits_cuda(const Tensor& x, const Tensor& weight, bool programmatic_launch) {
  const DeviceGuard guard(x);
  const RouterLogitsCall call(x, weight, programmatic_launch);
  if (call.out.numel() > 0) launch_router_logits(call.params, current_stream(guard.device()));
  return call.out;
}

HF_FASTPATH_KERNEL(CUDA, "router_logits", router_logits_cuda)

}  // namespace hf_fastpath
