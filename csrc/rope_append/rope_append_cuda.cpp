// torch.ops.hf_fastpath.rope_append on a GPU: see hf_fastpath/ops/rope_append.py for the contract.
#include "common/composed_ops.h"
#include "rope_append/rope_append_cuda_glue.h"

namespace hf_fastpath {

Tensor rope_append_cuda(const Tensor& qkv, const std::optional<Tensor>& bias,
                        const std::optional<Tensor>& cos, const std::optional<Tensor>& sin,
                        const Tensor& k_cache, const Tensor& v_cache, const Tensor& seq_lens,
                        int64_t num_heads, const std::optional<Tensor>& kv_table, int64_t layer,
                        const std::optional<Tensor>& k_scales, const std::optional<Tensor>& v_scales,
                        const std::optional<Tensor>& block_table, bool neighbors,
                        const std::optional<Tensor>& q_norm_weight,
                        const std::optional<Tensor>& k_norm_weight, double head_norm_eps,
                        double head_norm_offset, bool programmatic_launch, const std::optional<Tensor>& k,
                        const std::optional<Tensor>& v) {
  constexpr const char* kOp = "rope_append";
  const int64_t features = head_features(qkv, k, v), batch = qkv.size(0), query_len = qkv.size(1);
  const DType dtype = dtype_of(qkv, kOp);
  STD_TORCH_CHECK(!bias || (bias->numel() == features && dtype_of(*bias, kOp) == dtype),
                  "hf_fastpath::rope_append: bias has to have ", features, " elements of qkv's dtype");
  const DeviceGuard guard(qkv);
  RopeAppendCall call(batch, query_len, features, dtype, cos, sin, k_cache, v_cache, seq_lens, num_heads,
                      kv_table, layer, k_scales, v_scales, block_table, neighbors, kOp);
  call.add_head_norms(q_norm_weight, k_norm_weight, head_norm_eps, head_norm_offset, kOp);
  const HeadInputs inputs =
      head_inputs(qkv, k, v, num_heads, k_cache.size(1), k_cache.size(3), call.params.norms_all_heads);
  call.read(inputs);
  std::optional<Tensor> shift;
  if (bias) shift = hf_fastpath::contiguous(*bias);
  Tensor q = empty_like_with_sizes(qkv, {batch, query_len, num_heads, k_cache.size(3)});
  call.params.bias = data_or_null(shift);
  call.params.q_out = q.data_ptr();
  call.launch(current_stream(guard.device()), programmatic_launch);
  return q;
}

HF_FASTPATH_KERNEL(CUDA, "rope_append", rope_append_cuda)

}  // namespace hf_fastpath
