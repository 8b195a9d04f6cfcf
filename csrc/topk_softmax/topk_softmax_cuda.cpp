// torch.ops.hf_fastpath.topk_softmax on a GPU: see hf_fastpath/ops/topk_softmax.py for the contract.
#include "common/cuda_glue.h"
#include "topk_softmax/topk_softmax.h"
#include "topk_softmax/topk_softmax_glue.h"

namespace hf_fastpath {

Tensor topk_softmax_cuda(const Tensor& logits, const Tensor& expert_ids, bool normalized, bool rounded,
                         bool programmatic_launch) {
  const DeviceGuard guard(logits);
  check_topk_softmax(logits, expert_ids);
  const Tensor scores = hf_fastpath::contiguous(logits);
  Tensor out = empty_weights(expert_ids);
  TopkSoftmaxParams p{};
  p.logits = scores.data_ptr();
  p.ids = static_cast<int64_t*>(expert_ids.data_ptr());
  p.weights = static_cast<float*>(out.data_ptr());
  p.rows = static_cast<int>(logits.size(0));
  p.num_experts = static_cast<int>(logits.size(1));
  p.top_k = static_cast<int>(expert_ids.size(1));
  p.normalized = normalized;
  p.rounded = rounded;
  p.dtype = dtype_of(logits, "topk_softmax");
  p.programmatic_launch = programmatic_launch;
  if (p.rows > 0) launch_topk_softmax(p, current_stream(guard.device()));
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(hf_fastpath, CUDA, m) { m.impl("topk_softmax", TORCH_BOX(&topk_softmax_cuda)); }

}  // namespace hf_fastpath
