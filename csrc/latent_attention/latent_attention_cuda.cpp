// torch.ops.hf_fastpath.latent_attention on a GPU: see hf_fastpath/ops/latent_attention.py for the contract.
#include "common/cuda_glue.h"
#include "latent_attention/latent_attention.h"
#include "latent_attention/latent_attention_glue.h"

namespace hf_fastpath {

Tensor latent_attention_cuda(const Tensor& q_latent, const Tensor& q_rope, const Tensor& latents,
                             const Tensor& rope_keys, const Tensor& seq_lens,
                             const std::optional<Tensor>& starts, double scale,
                             const std::optional<Tensor>& kv_table, int64_t layer,
                             const std::optional<Tensor>& new_latent, const std::optional<Tensor>& new_rope,
                             const std::optional<Tensor>& cos, const std::optional<Tensor>& sin,
                             int64_t rotation, bool programmatic_launch) {
  const DeviceGuard guard(q_latent);
  const LatentAttentionCall call(q_latent, q_rope, latents, rope_keys, seq_lens, starts, scale, kv_table,
                                 layer, new_latent, new_rope, cos, sin, rotation, programmatic_launch);
  if (call.out.numel() == 0) return call.out;
  Tensor workspace =
      torch::stable::new_empty(q_latent, {latent_workspace_bytes(call.params)}, ScalarType::Byte);
  launch_latent_attention(call.params, workspace.data_ptr(), current_stream(guard.device()));
  return call.out;
}

HF_FASTPATH_KERNEL(CUDA, "latent_attention", latent_attention_cuda)

}  // namespace hf_fastpath
