// torch.ops.hf_fastpath.lora_up on a GPU: see hf_fastpath/ops/lora_up.py for the contract.
#include "common/cuda_glue.h"
#include "lora_up/lora_up.h"
#include "lora_up/lora_up_glue.h"

namespace hf_fastpath {

Tensor lora_up_cuda(const Tensor& base, const Tensor& hidden, const std::vector<Tensor>& weights,
                    const std::vector<double>& scales, const std::vector<int64_t>& firsts,
                    const std::optional<Tensor>& residual, int64_t activation, bool gated,
                    bool programmatic_launch, const std::optional<Tensor>& chosen,
                    const std::vector<int64_t>& owners) {
  const DeviceGuard guard(base);
  const LoraUpCall call(base, hidden, weights, scales, firsts, residual, activation, gated,
                        programmatic_launch, chosen, owners);
  launch_lora_up(call.params, current_stream(guard.device()));
  return call.out;
}

HF_FASTPATH_KERNEL(CUDA, "lora_up", lora_up_cuda)

}  // namespace hf_fastpath
