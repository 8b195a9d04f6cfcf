// torch.ops.hf_fastpath.head_products on a GPU: see hf_fastpath/ops/head_products.py for the contract.
#include "common/cuda_glue.h"
#include "head_products/head_products.h"
#include "head_products/head_products_glue.h"

namespace hf_fastpath {

Tensor head_products_cuda(const Tensor& x, const Tensor& weight, bool transposed, bool programmatic_launch) {
  const DeviceGuard guard(x);
  const HeadProductsCall call(x, weight, transposed, programmatic_launch);
  if (call.out.numel() > 0) launch_head_products(call.params, current_stream(guard.device()));
  return call.out;
}

HF_FASTPATH_KERNEL(CUDA, "head_products", head_products_cuda)

}  // namespace hf_fastpath
