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

HF_FASTPATH_KERNEL(CUDA, "exponential_race", exponential_race)

}  // namespace hf_fastpath
