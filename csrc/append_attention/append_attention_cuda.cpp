// torch.ops.hf_fastpath.append_attention on a GPU: see hf_fastpath/ops/append_attention.py for the contract.
#include "append_attention/append_attention.h"
#include "common/cuda_glue.h"

namespace hf_fastpath {
namespace {

bool is_aligned16(const Tensor& tensor) { return reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0; }

Tensor append_attention_cuda(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                             const Tensor& seq_lens, const std::optional<Tensor>& starts, double scale,
                             int64_t window, double softcap, const std::optional<Tensor>& sinks,
                             bool overlap) {
  constexpr const char* kOp = "append_attention";
  STD_TORCH_CHECK(q.dim() == 4 && q.size(1) >= 1 && q.size(0) <= 65535,
                  "hf_fastpath::append_attention: q has to be [batch, query_len, heads, head_dim]");
  const int64_t batch = q.size(0), query_len = q.size(1), num_heads = q.size(2), head_dim = q.size(3);
  STD_TORCH_CHECK(head_dim >= kMinAppendHeadDim && head_dim <= kMaxAppendHeadDim && head_dim % 8 == 0,
                  "hf_fastpath::append_attention: head_dim is ", head_dim,
                  ", expected 32 to 256 in steps of 8");
  STD_TORCH_CHECK(
      k_cache.dim() == 4 && sizes_of(k_cache) == sizes_of(v_cache) && k_cache.size(0) == batch &&
          k_cache.size(3) == head_dim && k_cache.size(1) > 0 && num_heads % k_cache.size(1) == 0 &&
          k_cache.size(2) >= query_len,
      "hf_fastpath::append_attention: the caches do not match q: expected [batch, kv_heads, capacity, "
      "head_dim] with kv_heads a divisor of q's heads and room for the new tokens");
  STD_TORCH_CHECK(k_cache.is_contiguous() && v_cache.is_contiguous(),
                  "hf_fastpath::append_attention: the caches have to be contiguous");
  STD_TORCH_CHECK(dtype_of(k_cache, kOp) == dtype_of(q, kOp) && dtype_of(v_cache, kOp) == dtype_of(q, kOp),
                  "hf_fastpath::append_attention: the caches differ from q in dtype");
  STD_TORCH_CHECK(seq_lens.numel() == batch && seq_lens.scalar_type() == ScalarType::Int &&
                      (!starts || (starts->numel() == batch && starts->scalar_type() == ScalarType::Int)),
                  "hf_fastpath::append_attention: seq_lens and starts have to be int32 [batch]");
  STD_TORCH_CHECK(!sinks || (dtype_of(*sinks, kOp) == dtype_of(q, kOp) && sinks->dim() == 1 &&
                             sinks->size(0) == num_heads),
                  "hf_fastpath::append_attention: sinks has to be [heads] in q's dtype");

  const DeviceGuard guard(q);
  const cudaStream_t stream = current_stream(guard.device());
  Tensor query = hf_fastpath::contiguous(q);
  if (!is_aligned16(query)) query = torch::stable::clone(query);  // a view that starts anywhere
  const Tensor keys = is_aligned16(k_cache) ? k_cache : torch::stable::clone(k_cache);
  const Tensor values = is_aligned16(v_cache) ? v_cache : torch::stable::clone(v_cache);
  const Tensor lens = hf_fastpath::contiguous(seq_lens);
  std::optional<Tensor> first, logits;
  if (starts) first = hf_fastpath::contiguous(*starts);
  if (sinks) logits = hf_fastpath::contiguous(*sinks);
  Tensor out = empty_like_with_sizes(query, {batch, query_len, num_heads * head_dim});

  AppendAttentionParams p{};
  p.q = query.data_ptr();
  p.k_cache = keys.data_ptr();
  p.v_cache = values.data_ptr();
  p.seq_lens = static_cast<const int32_t*>(lens.data_ptr());
  p.starts = static_cast<const int32_t*>(data_or_null(first));
  p.sinks = data_or_null(logits);
  p.capacity = k_cache.size(2);
  p.out = out.data_ptr();
  p.scale = static_cast<float>(scale);
  p.softcap = static_cast<float>(softcap);
  p.window = static_cast<int>(window);
  p.overlap = overlap;
  p.batch = static_cast<int>(batch);
  p.query_len = static_cast<int>(query_len);
  p.num_heads = static_cast<int>(num_heads);
  p.num_kv_heads = static_cast<int>(k_cache.size(1));
  p.group = p.num_heads / p.num_kv_heads;
  p.head_dim = static_cast<int>(head_dim);
  p.dtype = dtype_of(query, kOp);

  const AppendAttentionPlan plan = plan_append_attention(p);
  const int64_t needed = append_attention_workspace_bytes(p, plan);
  std::optional<Tensor> workspace;
  if (needed > 0) {
    workspace = empty_like_with_sizes(query, {needed / element_size(p.dtype)});
    p.workspace = workspace->data_ptr();
  }
  launch_append_attention(p, plan, stream);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(hf_fastpath, CUDA, m) {
  m.impl("append_attention", TORCH_BOX(&append_attention_cuda));
}

}  // namespace hf_fastpath
