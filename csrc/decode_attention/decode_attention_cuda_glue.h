// Torch-facing checks and launch that decode_attention and quantizing_attention share on a GPU.
#pragma once

#include "common/cuda_glue.h"
#include "common/pages_glue.h"
#include "decode_attention/decode_attention.h"

namespace hf_fastpath {

inline bool is_aligned16(const Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0;
}

// Calls launch(the parameters, its stream) and returns the output; `op` is the one whose arguments these are.
template <class Launch>
Tensor attend_cuda(const char* op, const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                   const Tensor& seq_lens, const std::optional<Tensor>& starts, double scale, int64_t window,
                   const std::optional<Tensor>& kv_table, int64_t layer,
                   const std::optional<Tensor>& workspace, bool overlap, const std::optional<Tensor>& sinks,
                   const std::optional<Tensor>& k_scales, const std::optional<Tensor>& v_scales,
                   const std::optional<Tensor>& block_table, Launch launch) {
  STD_TORCH_CHECK(q.dim() == 4 && q.size(1) >= 1 && q.size(1) <= kMaxQueryLen, "hf_fastpath::", op,
                  ": q has to be [batch, 1 to 16, heads, head_dim]");
  const int64_t batch = q.size(0), query_len = q.size(1), num_heads = q.size(2), head_dim = q.size(3);
  STD_TORCH_CHECK(head_dim >= kMinHeadDim && head_dim <= kMaxHeadDim && head_dim % 8 == 0,
                  "hf_fastpath::", op, ": head_dim is ", head_dim, ", expected 32 to 256 in steps of 8");
  STD_TORCH_CHECK(k_cache.dim() == 4 && sizes_of(k_cache) == sizes_of(v_cache) &&
                      (block_table || k_cache.size(0) == batch) && k_cache.size(3) == head_dim &&
                      k_cache.size(1) > 0 && num_heads % k_cache.size(1) == 0,
                  "hf_fastpath::", op,
                  ": the caches do not match q: expected [batch, kv_heads, capacity, "
                  "head_dim] with kv_heads a divisor of q's heads");
  STD_TORCH_CHECK(k_cache.is_contiguous() && v_cache.is_contiguous(), "hf_fastpath::", op,
                  ": the caches have to be contiguous");
  const KvType type = kv_type_of(k_cache, op);
  STD_TORCH_CHECK(kv_type_of(v_cache, op) == type, "hf_fastpath::", op,
                  ": k_cache and v_cache differ in dtype");
  check_kv_scales(k_cache, k_scales, type, op, "k_scales");
  check_kv_scales(k_cache, v_scales, type, op, "v_scales");
  const Pages pages = load_pages(block_table, kv_table, layer, k_cache, type, batch, op);
  if (!pages) check_kv_table(kv_table, layer, type, op);
  STD_TORCH_CHECK(seq_lens.numel() == batch && seq_lens.scalar_type() == ScalarType::Int &&
                      (!starts || (starts->numel() == batch && starts->scalar_type() == ScalarType::Int)),
                  "hf_fastpath::", op, ": seq_lens and starts have to be int32 [batch]");
  STD_TORCH_CHECK(
      !sinks || (dtype_of(*sinks, op) == dtype_of(q, op) && sinks->dim() == 1 && sinks->size(0) == num_heads),
      "hf_fastpath::", op, ": sinks has to be [heads] in q's dtype");

  const DeviceGuard guard(q);
  const cudaStream_t stream = current_stream(guard.device());
  Tensor query = hf_fastpath::contiguous(q);
  if (!is_aligned16(query)) query = torch::stable::clone(query);  // a view that starts anywhere
  const Tensor keys = is_aligned16(k_cache) ? k_cache : torch::stable::clone(k_cache);
  const Tensor values = is_aligned16(v_cache) ? v_cache : torch::stable::clone(v_cache);
  const Tensor lens = hf_fastpath::contiguous(seq_lens);
  std::optional<Tensor> first, table, logits;
  if (starts) first = hf_fastpath::contiguous(*starts);
  if (kv_table) table = hf_fastpath::contiguous(*kv_table);
  if (sinks) logits = hf_fastpath::contiguous(*sinks);
  Tensor out = empty_like_with_sizes(query, {batch, query_len, num_heads * head_dim});

  DecodeAttentionParams p{};
  p.q = query.data_ptr();
  p.k_cache = keys.data_ptr();
  p.v_cache = values.data_ptr();
  p.seq_lens = static_cast<const int32_t*>(lens.data_ptr());
  p.starts = static_cast<const int32_t*>(data_or_null(first));
  p.kv_table = static_cast<const int64_t*>(data_or_null(table));
  p.sinks = data_or_null(logits);
  p.layer = layer;
  p.pages = pages;
  p.capacity = pages ? pages.capacity : k_cache.size(2);
  p.out = out.data_ptr();
  p.scale = static_cast<float>(scale);
  p.window = static_cast<int>(window);
  p.overlap = overlap;
  p.batch = static_cast<int>(batch);
  p.query_len = static_cast<int>(query_len);
  p.num_heads = static_cast<int>(num_heads);
  p.num_kv_heads = static_cast<int>(k_cache.size(1));
  p.group = p.num_heads / p.num_kv_heads;
  p.group_inverse = inverse_of(p.group);
  p.num_kv_heads_inverse = inverse_of(p.num_kv_heads);
  p.head_dim = static_cast<int>(head_dim);
  p.dtype = dtype_of(query, op);
  p.kv_type = type;
  if (k_scales) p.k_scales = static_cast<const uint16_t*>(k_scales->data_ptr());
  if (v_scales) p.v_scales = static_cast<const uint16_t*>(v_scales->data_ptr());

  const int64_t needed = decode_attention_workspace_bytes(p);
  Tensor scratch = workspace ? *workspace : empty_like_with_sizes(query, {needed / element_size(p.dtype)});
  p.workspace = scratch.data_ptr();
  p.workspace_bytes = scratch.numel() * (workspace ? 1 : element_size(p.dtype));
  STD_TORCH_CHECK(!workspace || (scratch.scalar_type() == ScalarType::Byte && scratch.is_contiguous() &&
                                 is_aligned16(scratch) && p.workspace_bytes >= needed),
                  "hf_fastpath::", op, ": workspace has to be contiguous, aligned uint8 of at least ", needed,
                  " bytes: allocate workspace_bytes(...), zeroed");
  p.workspace_bytes -= p.workspace_bytes % 4;  // counters are words, from the end backwards
  if (!workspace) {
    const int64_t counters = decode_attention_counter_bytes(p);
    HF_FASTPATH_CUDA_CHECK(cudaMemsetAsync(static_cast<char*>(p.workspace) + p.workspace_bytes - counters, 0,
                                           static_cast<size_t>(counters), stream));
  }
  launch(p, stream);
  return out;
}

}  // namespace hf_fastpath
