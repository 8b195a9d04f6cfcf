// torch.ops.hf_fastpath.rope_append on a GPU: see hf_fastpath/ops/rope_append.py for the contract.
#include "common/cuda_glue.h"
#include "rope_append/rope_append.h"

namespace hf_fastpath {
namespace {

Tensor rope_append(const Tensor& qkv, const std::optional<Tensor>& bias, const std::optional<Tensor>& cos,
                   const std::optional<Tensor>& sin, const Tensor& k_cache, const Tensor& v_cache,
                   const Tensor& seq_lens, int64_t num_heads, const std::optional<Tensor>& kv_table,
                   int64_t layer) {
  constexpr const char* kOp = "rope_append";
  STD_TORCH_CHECK(
      qkv.dim() == 3 && k_cache.dim() == 4 && sizes_of(k_cache) == sizes_of(v_cache),
      "hf_fastpath::rope_append: expected qkv [batch, query_len, features] and caches of one shape "
      "[batch, kv_heads, capacity, head_dim]");
  const int64_t batch = qkv.size(0), query_len = qkv.size(1), features = qkv.size(2);
  const int64_t kv_heads = k_cache.size(1), head_dim = k_cache.size(3);
  STD_TORCH_CHECK(features == (num_heads + 2 * kv_heads) * head_dim && k_cache.size(0) == batch,
                  "hf_fastpath::rope_append: qkv has ", features, " features and batch ", batch,
                  ", expected (heads + 2*kv_heads)*head_dim = ", (num_heads + 2 * kv_heads) * head_dim,
                  " and batch ", k_cache.size(0));
  STD_TORCH_CHECK(
      k_cache.is_contiguous() && v_cache.is_contiguous() && seq_lens.numel() == batch &&
          seq_lens.scalar_type() == ScalarType::Int && dtype_of(v_cache, kOp) == dtype_of(k_cache, kOp),
      "hf_fastpath::rope_append: the caches have to be contiguous and alike, seq_lens int32 [batch]");
  STD_TORCH_CHECK(cos.has_value() == sin.has_value(), "hf_fastpath::rope_append: cos and sin go together");
  const DType dtype = dtype_of(qkv, kOp);
  for (const std::optional<Tensor>* given : {&bias, &cos, &sin}) {
    STD_TORCH_CHECK(!*given || dtype_of(**given, kOp) == dtype,
                    "hf_fastpath::rope_append: bias, cos and sin have to be of qkv's dtype");
  }
  STD_TORCH_CHECK(!bias || bias->numel() == features, "hf_fastpath::rope_append: bias has ",
                  bias ? bias->numel() : 0, " elements, expected ", features);
  STD_TORCH_CHECK(!cos || (cos->dim() == 3 && sizes_of(*cos) == sizes_of(*sin) && cos->size(1) == query_len &&
                           (cos->size(0) == 1 || cos->size(0) == batch) && cos->size(2) <= head_dim &&
                           cos->size(2) % 2 == 0),
                  "hf_fastpath::rope_append: cos and sin have to be [batch or 1, query_len, rotary_dim]");
  STD_TORCH_CHECK(!kv_table || (kv_table->dim() == 2 && layer >= 0 && layer < kv_table->size(0)),
                  "hf_fastpath::rope_append: layer ", layer, " is not a row of kv_table");

  const DeviceGuard guard(qkv);
  const Tensor input = hf_fastpath::contiguous(qkv), lens = hf_fastpath::contiguous(seq_lens);
  std::optional<Tensor> shift, c, s, table;
  if (bias) shift = hf_fastpath::contiguous(*bias);
  if (cos) c = hf_fastpath::contiguous(*cos), s = hf_fastpath::contiguous(*sin);
  if (kv_table) table = hf_fastpath::contiguous(*kv_table);
  Tensor q = empty_like_with_sizes(input, {batch, query_len, num_heads, head_dim});

  RopeAppendParams p{};
  p.qkv = input.data_ptr();
  p.bias = data_or_null(shift);
  p.cos = data_or_null(c);
  p.sin = data_or_null(s);
  p.k_cache = k_cache.data_ptr();
  p.v_cache = v_cache.data_ptr();
  p.q_out = q.data_ptr();
  p.seq_lens = static_cast<const int32_t*>(lens.data_ptr());
  p.kv_table = static_cast<const int64_t*>(data_or_null(table));
  p.layer = layer;
  p.capacity = k_cache.size(2);
  p.batch = static_cast<int>(batch);
  p.query_len = static_cast<int>(query_len);
  p.num_heads = static_cast<int>(num_heads);
  p.num_kv_heads = static_cast<int>(kv_heads);
  p.head_dim = static_cast<int>(head_dim);
  p.rotary_dim = c ? static_cast<int>(c->size(2)) : 0;
  p.cos_batch_stride = c && c->size(0) > 1 ? query_len * p.rotary_dim : 0;
  p.dtype = dtype;
  p.cache_dtype = dtype_of(k_cache, kOp);
  launch_rope_append(p, current_stream(guard.device()));
  return q;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(hf_fastpath, CUDA, m) { m.impl("rope_append", TORCH_BOX(&rope_append)); }

}  // namespace hf_fastpath
