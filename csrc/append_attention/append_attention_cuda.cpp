// torch.ops.hf_fastpath.append_attention on a GPU: see hf_fastpath/ops/append_attention.py for the contract.
#include "append_attention/append_attention.h"
#include "common/attention_glue.h"
#include "common/callable_ops.h"

namespace hf_fastpath {
namespace {

Tensor append_attention_cuda(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                             const Tensor& seq_lens, const std::optional<Tensor>& starts, double scale,
                             int64_t window, double softcap, const std::optional<Tensor>& sinks,
                             bool programmatic_launch) {
  constexpr const char* kOp = "append_attention";
  STD_TORCH_CHECK(q.dim() == 4 && q.size(1) >= 1 && q.size(0) <= 65535,
                  "hf_fastpath::append_attention: q has to be [batch, query_len, heads, head_dim]");
  check_attention(kOp, q, k_cache, v_cache, false, seq_lens, starts, sinks);
  STD_TORCH_CHECK(k_cache.size(2) >= q.size(1), "hf_fastpath::append_attention: the caches have ",
                  k_cache.size(2), " slots, expected room for the ", q.size(1), " new tokens");
  STD_TORCH_CHECK(dtype_of(k_cache, kOp) == dtype_of(q, kOp) && dtype_of(v_cache, kOp) == dtype_of(q, kOp),
                  "hf_fastpath::append_attention: the caches differ from q in dtype");

  const DeviceGuard guard(q);
  const cudaStream_t stream = current_stream(guard.device());
  const AttentionTensors tensors(q, k_cache, v_cache, seq_lens, starts, sinks);
  auto p = tensors.params<AppendAttentionParams>(kOp, scale, window, programmatic_launch);
  p.softcap = static_cast<float>(softcap);

  const AppendAttentionPlan plan = plan_append_attention(p);
  const int64_t needed = append_attention_workspace_bytes(p, plan);
  std::optional<Tensor> workspace;
  if (needed > 0) {
    workspace = empty_like_with_sizes(tensors.q, {needed / element_size(p.dtype)});
    p.workspace = workspace->data_ptr();
  }
  launch_append_attention(p, plan, stream);
  return tensors.out;
}

}  // namespace

HF_FASTPATH_KERNEL(CUDA, "append_attention", append_attention_cuda)

}  // namespace hf_fastpath
