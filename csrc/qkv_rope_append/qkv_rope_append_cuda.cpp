// torch.ops.hf_fastpath.qkv_rope_append on a GPU: see hf_fastpath/ops/qkv_rope_append.py for the contract.
// One kernel where gemv_ring.cuh, gemv_ring_rows.cuh or gemv_columns.cuh takes the shape; else the
// norm, the projections over weights where the model keeps them, and rope_append.
#include "gemv/gemv_cuda_glue.h"
#include "rope_append/rope_append_cuda_glue.h"

namespace hf_fastpath {

Tensor qkv_rope_append_cuda(const Tensor& x, const Tensor& q_weight, const std::optional<Tensor>& k_weight,
                            const std::optional<Tensor>& v_weight, const std::optional<Tensor>& q_bias,
                            const std::optional<Tensor>& k_bias, const std::optional<Tensor>& v_bias,
                            bool transposed, const std::optional<Tensor>& cos,
                            const std::optional<Tensor>& sin, const Tensor& k_cache, const Tensor& v_cache,
                            const Tensor& seq_lens, int64_t num_heads, const std::optional<Tensor>& kv_table,
                            int64_t layer, int64_t norm, const std::optional<Tensor>& norm_weight,
                            const std::optional<Tensor>& norm_bias, double norm_eps, bool programmatic_launch,
                            const std::optional<Tensor>& k_scales, const std::optional<Tensor>& v_scales,
                            const std::optional<Tensor>& block_table, bool neighbors,
                            const std::optional<Tensor>& q_norm_weight,
                            const std::optional<Tensor>& k_norm_weight, double head_norm_eps,
                            double head_norm_offset) {
  constexpr const char* kOp = "qkv_rope_append";
  check_projections(x, k_weight, v_weight, k_bias, v_bias, transposed);
  const DeviceGuard guard(x);
  const Tensor input = gemv_input(x);
  GemvParams p = gemv_params(input, kOp);
  p.transposed = transposed;
  p.programmatic_launch = programmatic_launch;
  std::optional<Tensor> kept[3] = {add_segment(p, q_weight, q_bias, kOp)};
  if (k_weight) {
    kept[1] = add_segment(p, *k_weight, k_bias, kOp);
    kept[2] = add_segment(p, *v_weight, v_bias, kOp);
  }
  const InputNorm input_norm(input, norm, norm_weight, norm_bias, norm_eps, kOp);
  const int64_t batch = x.size(0), query_len = x.size(1);
  RopeAppendCall call(batch, query_len, p.n, p.dtype, cos, sin, k_cache, v_cache, seq_lens, num_heads,
                      kv_table, layer, k_scales, v_scales, block_table, neighbors, kOp);
  STD_TORCH_CHECK(!k_weight || (q_weight.size(0) == num_heads * k_cache.size(3) &&
                                k_weight->size(0) == v_weight->size(0)),
                  "hf_fastpath::qkv_rope_append: the projections' features do not match the heads");
  call.add_head_norms(q_norm_weight, k_norm_weight, head_norm_eps, head_norm_offset, kOp);
  const cudaStream_t stream = current_stream(guard.device());
  Tensor q = empty_like_with_sizes(input, {batch, query_len, num_heads, k_cache.size(3)});
  call.params.q_out = q.data_ptr();
  // Products cannot be quantized or normed as they come, and their kernels know no pages.
  const bool as_they_come = !is_quantized(call.params.kv_type) && !call.pages && !call.params.q_norm;
  if (as_they_come && input_norm.launch_as_one(p, &call.params, stream)) return q;
  Tensor normed;
  if (as_they_come) {
    input_norm.launch_norm(p, input, normed);
    if (fits_one_kernel(p, &call.params)) {
      launch_gemv(p, &call.params, stream);
      return q;
    }
  }
  Tensor qkv = empty_like_with_sizes(input, sizes_with_last(input, p.n));
  p.out = qkv.data_ptr();
  if (as_they_come) {
    launch_gemv(p, nullptr, stream);
  } else {
    input_norm.launch(p, input, stream);
  }
  call.launch_joined(qkv, stream, programmatic_launch);
  return q;
}

HF_FASTPATH_KERNEL(CUDA, "qkv_rope_append", qkv_rope_append_cuda)

}  // namespace hf_fastpath
