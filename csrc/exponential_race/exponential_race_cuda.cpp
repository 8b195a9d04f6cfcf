// torch.ops.hf_fastpath.exponential_race on a GPU: see hf_fastpath/ops/exponential_race.py for the contract.
#include "exponential_race/exponential_race_cuda.h"

#include "common/cuda_glue.h"
#include "exponential_race/exponential_race_glue.h"

namespace hf_fastpath {
namespace {

Tensor exponential_race(const Tensor& logits, const Tensor& noise, const Tensor& settings,
                        bool programmatic_launch) {
  const DeviceGuard guard(logits);
  const ExponentialRaceCall call(logits, noise, settings, programmatic_launch);
  launch_exponential_race(call.params, current_stream(guard.device()));
  return call.out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(hf_fastpath, CUDA, m) { m.impl("exponential_race", TORCH_BOX(&exponential_race)); }

}  // namespace hf_fastpath
