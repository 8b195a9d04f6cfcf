// torch.ops.hf_fastpath.quantizing_attention on a GPU: see hf_fastpath/ops/quantizing_attention.py for the
// contract.
#include "decode_attention/decode_attention_cuda_glue.h"
#include "quantizing_attention/quantizing_attention.h"

namespace hf_fastpath {
namespace {

Tensor quantizing_attention_cuda(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& k_cache,
                                 const Tensor& v_cache, const Tensor& k_scales, const Tensor& v_scales,
                                 const Tensor& seq_lens, const std::optional<Tensor>& starts, double scale,
                                 int64_t window, const std::optional<Tensor>& kv_table, int64_t layer,
                                 const std::optional<Tensor>& workspace, bool programmatic_launch,
                                 const std::optional<Tensor>& sinks, double softcap,
                                 const std::optional<Tensor>& slopes, const std::optional<Tensor>& biases,
                                 const std::optional<Tensor>& other, const std::optional<Tensor>& other_lse) {
  constexpr const char* kOp = "quantizing_attention";
  STD_TORCH_CHECK(
      q.dim() == 4 && k_cache.dim() == 4 && sizes_of(k) == sizes_of(v) &&
          sizes_of(k) == std::vector<int64_t>({q.size(0), k_cache.size(1), q.size(1), q.size(3)}) &&
          dtype_of(k, kOp) == DType::kFloat32 && dtype_of(v, kOp) == DType::kFloat32,
      "hf_fastpath::quantizing_attention: k and v have to be float32 [batch, kv_heads, query_len, "
      "head_dim]");
  STD_TORCH_CHECK(
      is_quantized(kv_type_of(k_cache, kOp)) && is_aligned16(k_cache) && is_aligned16(v_cache),
      "hf_fastpath::quantizing_attention: the caches have to be int8 or float8_e4m3fn and start at "
      "a multiple of 16 bytes");
  STD_TORCH_CHECK(kv_table || q.size(1) <= k_cache.size(2), "hf_fastpath::quantizing_attention: query_len ",
                  q.size(1), " exceeds the cache's capacity ", k_cache.size(2), ": grow the cache first");
  const DeviceGuard guard(q);
  const auto aligned = [](const Tensor& tensor) {
    const Tensor whole = hf_fastpath::contiguous(tensor);
    return is_aligned16(whole) ? whole : torch::stable::clone(whole);
  };
  const Tensor new_k = aligned(k), new_v = aligned(v);
  return attend_cuda(kOp, q, k_cache, v_cache, seq_lens, starts, scale, window, kv_table, layer, workspace,
                     programmatic_launch, sinks, k_scales, v_scales, std::nullopt, softcap, slopes, biases,
                     other, other_lse, std::nullopt, [&](DecodeAttentionParams params, cudaStream_t stream) {
                       params.new_k = static_cast<const float*>(new_k.data_ptr());
                       params.new_v = static_cast<const float*>(new_v.data_ptr());
                       launch_quantizing_attention(params, stream);
                     });
}

}  // namespace

HF_FASTPATH_KERNEL(CUDA, "quantizing_attention", quantizing_attention_cuda)

}  // namespace hf_fastpath
