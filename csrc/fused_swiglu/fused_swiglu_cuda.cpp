// torch.ops.hf_fastpath.fused_swiglu on a GPU: see hf_fastpath/ops/fused_swiglu.py for the contract.
#include "common/composed_ops.h"
#include "common/cuda_glue.h"
#include "common/rows_glue.h"
#include "fused_swiglu/fused_swiglu.h"
#include "fused_swiglu/gate_glue.h"

namespace hf_fastpath {

Tensor fused_swiglu_cuda(const Tensor& gate, const Tensor& up, int64_t activation) {
  constexpr const char* kOp = "fused_swiglu";
  const Activation act = gate_of(activation);
  STD_TORCH_CHECK(dtype_of(gate, kOp) == dtype_of(up, kOp),
                  "hf_fastpath::fused_swiglu: gate and up differ in dtype");
  const bool one_gate = has_one_gate(gate, up);
  const DeviceGuard guard(gate);
  const RowView g = row_view(gate), u = row_view(up);
  Tensor out = empty_like_with_sizes(up, sizes_of(up));
  if (up.numel() > 0) {
    launch_fused_swiglu(g.data, u.data, out.data_ptr(), u.rows, u.columns, g.stride, u.stride, one_gate,
                        dtype_of(up, kOp), act, current_stream(guard.device()));
  }
  return out;
}

HF_FASTPATH_KERNEL(CUDA, "fused_swiglu", fused_swiglu_cuda)

}  // namespace hf_fastpath
