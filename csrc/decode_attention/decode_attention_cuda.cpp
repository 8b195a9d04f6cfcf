// torch.ops.hf_fastpath.decode_attention on a GPU: see hf_fastpath/ops/decode_attention.py for the contract.
#include "common/composed_ops.h"
#include "decode_attention/decode_attention_cuda_glue.h"

namespace hf_fastpath {
Tensor decode_attention_cuda(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                             const Tensor& seq_lens, const std::optional<Tensor>& starts, double scale,
                             int64_t window, const std::optional<Tensor>& kv_table, int64_t layer,
                             const std::optional<Tensor>& workspace, bool programmatic_launch,
                             const std::optional<Tensor>& sinks, const std::optional<Tensor>& k_scales,
                             const std::optional<Tensor>& v_scales, const std::optional<Tensor>& block_table,
                             double softcap, const std::optional<Tensor>& slopes,
                             const std::optional<Tensor>& biases, const std::optional<Tensor>& other,
                             const std::optional<Tensor>& other_lse, const std::optional<Tensor>& lse) {
  return attend_cuda("decode_attention", q, k_cache, v_cache, seq_lens, starts, scale, window, kv_table,
                     layer, workspace, programmatic_launch, sinks, k_scales, v_scales, block_table, softcap,
                     slopes, biases, other, other_lse, lse, launch_decode_attention);
}

HF_FASTPATH_KERNEL(CUDA, "decode_attention", decode_attention_cuda)

}  // namespace hf_fastpath
