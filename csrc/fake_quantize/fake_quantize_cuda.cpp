// torch.ops.hf_fastpath.fake_quantize on a GPU: see hf_fastpath/ops/fake_quantize.py for the contract.
#include "common/cuda_glue.h"
#include "fake_quantize/fake_quantize.h"
#include "fake_quantize/fake_quantize_glue.h"

namespace hf_fastpath {

Tensor fake_quantize_cuda(const Tensor& x, int64_t quants, double limit, bool programmatic_launch) {
  const DeviceGuard guard(x);
  FakeQuantizeCall call(x, quants, limit, programmatic_launch);
  std::optional<Tensor> marks;
  if (call.marks_columns()) {
    marks = call.empty_marks(x);
    call.params.marks = static_cast<uint8_t*>(marks->mutable_data_ptr());
  }
  launch_fake_quantize(call.params, current_stream(guard.device()));
  return call.out;
}

STABLE_TORCH_LIBRARY_IMPL(hf_fastpath, CUDA, m) { m.impl("fake_quantize", TORCH_BOX(&fake_quantize_cuda)); }

}  // namespace hf_fastpath
