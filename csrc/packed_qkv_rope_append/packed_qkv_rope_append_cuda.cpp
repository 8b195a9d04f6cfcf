// torch.ops.hf_fastpath.packed_qkv_rope_append on a GPU: see hf_fastpath/ops/packed_qkv_rope_append.py for
// the contract. One kernel of packed_gemv's; or product and rope_append, for quantized caches, whose values
// it cannot quantize as they come, and for pairs of neighbors, whose rows it cannot fetch together.
#include "packed_gemv/packed_gemv_cuda_glue.h"
#include "rope_append/rope_append_cuda_glue.h"

namespace hf_fastpath {

Tensor packed_qkv_rope_append_cuda(const Tensor& x, const Tensor& quants, const Tensor& scales,
                                   const std::optional<Tensor>& zeros, double multiplier, int64_t format,
                                   const std::optional<Tensor>& cos, const std::optional<Tensor>& sin,
                                   const Tensor& k_cache, const Tensor& v_cache, const Tensor& seq_lens,
                                   int64_t num_heads, const std::optional<Tensor>& kv_table, int64_t layer,
                                   int64_t norm, const std::optional<Tensor>& norm_weight,
                                   const std::optional<Tensor>& norm_bias, double norm_eps,
                                   bool programmatic_launch, const std::optional<Tensor>& k_scales,
                                   const std::optional<Tensor>& v_scales, bool neighbors) {
  constexpr const char* kOp = "packed_qkv_rope_append";
  STD_TORCH_CHECK(x.dim() == 3,
                  "hf_fastpath::packed_qkv_rope_append: x has to be [batch, query_len, hidden_size]");
  const DeviceGuard guard(x);
  const Tensor input = hf_fastpath::contiguous(x);
  GemvParams p = gemv_params(input, kOp);
  p.programmatic_launch = programmatic_launch;
  const InputNorm input_norm(input, norm, norm_weight, norm_bias, norm_eps, kOp);
  const PackedTensors weight(p, quants, scales, zeros, multiplier, format, kOp);
  const int64_t batch = x.size(0), query_len = x.size(1);
  RopeAppendCall call(batch, query_len, p.n, p.dtype, cos, sin, k_cache, v_cache, seq_lens, num_heads,
                      kv_table, layer, k_scales, v_scales, std::nullopt, neighbors, kOp);
  const cudaStream_t stream = current_stream(guard.device());
  Tensor q = empty_like_with_sizes(input, {batch, query_len, num_heads, k_cache.size(3)});
  call.params.q_out = q.data_ptr();
  std::vector<Tensor> kept;
  if (weight.fits_append(p, call.params)) {
    weight.launch(p, &call.params, input_norm, input, kept, stream);
    return q;
  }
  const Tensor qkv = empty_like_with_sizes(input, sizes_with_last(input, p.n));
  p.out = qkv.data_ptr();
  weight.launch(p, nullptr, input_norm, input, kept, stream);
  call.launch_joined(qkv, stream, programmatic_launch);
  return q;
}

HF_FASTPATH_KERNEL(CUDA, "packed_qkv_rope_append", packed_qkv_rope_append_cuda)

}  // namespace hf_fastpath
