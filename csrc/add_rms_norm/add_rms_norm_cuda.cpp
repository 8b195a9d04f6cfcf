// torch.ops.hf_fastpath.add_rms_norm on a GPU: see hf_fastpath/ops/add_rms_norm.py for the contract.
#include "add_rms_norm/add_rms_norm.h"
#include "common/composed_ops.h"
#include "common/cuda_glue.h"

namespace hf_fastpath {

std::vector<Tensor> add_rms_norm_cuda(const Tensor& x, const Tensor& residual, const Tensor& weight,
                                      double eps, bool programmatic_launch) {
  constexpr const char* kOp = "add_rms_norm";
  check_added(x, residual, weight, kOp);
  const DeviceGuard guard(x);
  const Tensor input = hf_fastpath::contiguous(x), wide = hf_fastpath::contiguous(residual);
  const Tensor scale = hf_fastpath::contiguous(weight);
  Tensor out = empty_like_with_sizes(input, sizes_of(input)),
         sum = empty_like_with_sizes(wide, sizes_of(wide));
  const int64_t columns = scale.size(0);
  if (input.numel() > 0) {
    launch_add_rms_norm(input.data_ptr(), static_cast<const float*>(wide.data_ptr()), scale.data_ptr(),
                        out.data_ptr(), static_cast<float*>(sum.data_ptr()), input.numel() / columns, columns,
                        static_cast<float>(eps), programmatic_launch, dtype_of(input, kOp),
                        current_stream(guard.device()));
  }
  return {out, sum};
}

HF_FASTPATH_KERNEL(CUDA, "add_rms_norm", add_rms_norm_cuda)

}  // namespace hf_fastpath
