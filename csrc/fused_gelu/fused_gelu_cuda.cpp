// torch.ops.hf_fastpath.fused_gelu on a GPU: see hf_fastpath/ops/fused_gelu.py for the contract.
#include "common/cuda_glue.h"
#include "fused_gelu/fused_gelu.h"

namespace hf_fastpath {
namespace {

Tensor fused_gelu(const Tensor& x, int64_t approximate) {
  constexpr const char* kOp = "fused_gelu";
  const bool tanh_approximation =
      choice_of(approximate, Approximation::kTanh, "fused_gelu", "approximate") == Approximation::kTanh;
  const DeviceGuard guard(x);
  const Tensor input = hf_fastpath::contiguous(x);
  Tensor out = empty_like_with_sizes(input, sizes_of(input));
  launch_fused_gelu(input.data_ptr(), out.data_ptr(), input.numel(), dtype_of(input, kOp),
                    tanh_approximation ? Activation::kGeluTanh : Activation::kGelu,
                    current_stream(guard.device()));
  return out;
}

}  // namespace

HF_FASTPATH_KERNEL(CUDA, "fused_gelu", fused_gelu)

}  // namespace hf_fastpath
