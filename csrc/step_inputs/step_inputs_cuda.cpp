// torch.ops.hf_fastpath.step_inputs on a GPU: see hf_fastpath/ops/step_inputs.py for the contract.
#include "step_inputs/step_inputs_cuda.h"

#include "common/cuda_glue.h"
#include "step_inputs/step_inputs_glue.h"

namespace hf_fastpath {
namespace {

std::vector<Tensor> step_inputs(const Tensor& embedding, const Tensor& tokens, const Tensor& positions,
                                const std::optional<Tensor>& position_embedding, int64_t position_offset,
                                const std::vector<Tensor>& tables) {
  const DeviceGuard guard(embedding);
  StepInputsCall call(embedding, tokens, positions, position_embedding, position_offset, tables);
  launch_step_inputs(call.params, current_stream(guard.device()));
  return call.outputs;
}

}  // namespace

HF_FASTPATH_KERNEL(CUDA, "step_inputs", step_inputs)

}  // namespace hf_fastpath
