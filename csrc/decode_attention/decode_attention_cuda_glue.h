// Torch-facing checks and launch that decode_attention and quantizing_attention share on a GPU.
#pragma once

#include "common/attention_glue.h"
#include "common/composed_ops.h"
#include "common/pages_glue.h"
#include "decode_attention/decode_attention.h"

namespace hf_fastpath {

// Calls launch(the parameters, its stream) and returns the output; `op` is the one whose arguments these are.
template <class Launch>
Tensor attend_cuda(const char* op, const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                   const Tensor& seq_lens, const std::optional<Tensor>& starts, double scale, int64_t window,
                   const std::optional<Tensor>& kv_table, int64_t layer,
                   const std::optional<Tensor>& workspace, bool programmatic_launch,
                   const std::optional<Tensor>& sinks, const std::optional<Tensor>& k_scales,
                   const std::optional<Tensor>& v_scales, const std::optional<Tensor>& block_table,
                   double softcap, const std::optional<Tensor>& slopes, const std::optional<Tensor>& biases,
                   const std::optional<Tensor>& other, const std::optional<Tensor>& other_lse,
                   const std::optional<Tensor>& lse, Launch launch) {
  STD_TORCH_CHECK(q.dim() == 4 && q.size(1) >= 1 && q.size(1) <= kMaxQueryLen, "hf_fastpath::", op,
                  ": q has to be [batch, 1 to 16, heads, head_dim]");
  check_attention(op, q, k_cache, v_cache, block_table.has_value(), seq_lens, starts, sinks);
  const KvType type = kv_type_of(k_cache, op);
  STD_TORCH_CHECK(kv_type_of(v_cache, op) == type, "hf_fastpath::", op,
                  ": k_cache and v_cache differ in dtype");
  check_kv_scales(k_cache, k_scales, type, op, "k_scales");
  check_kv_scales(k_cache, v_scales, type, op, "v_scales");
  check_score_changes(op, q, sinks, softcap, slopes, biases);
  check_other_keys(op, q, other, other_lse, lse);
  const Pages pages = load_pages(block_table, kv_table, layer, k_cache, type, q.size(0), op);
  if (!pages) check_kv_table(kv_table, layer, type, op);

  const DeviceGuard guard(q);
  const cudaStream_t stream = current_stream(guard.device());
  const AttentionTensors tensors(q, k_cache, v_cache, seq_lens, starts, sinks);
  auto p = tensors.params<DecodeAttentionParams>(op, scale, window, programmatic_launch);
  const std::optional<Tensor> table = AttentionTensors::contiguous_or_none(kv_table);
  p.kv_table = static_cast<const int64_t*>(data_or_null(table));
  p.layer = layer;
  p.softcap = static_cast<float>(softcap);
  const std::optional<Tensor> of_heads = AttentionTensors::contiguous_or_none(slopes);
  p.slopes = static_cast<const float*>(data_or_null(of_heads));
  const std::optional<Tensor> of_distances = AttentionTensors::contiguous_or_none(biases);
  p.biases = static_cast<const float*>(data_or_null(of_distances));
  if (biases) p.distances = static_cast<int>(biases->size(-1));
  if (biases && biases->dim() == 3) p.bias_heads = p.num_heads;
  std::optional<Tensor> other_holder;
  if (other) other_holder = AttentionTensors::aligned(hf_fastpath::contiguous(*other));
  p.other = data_or_null(other_holder);
  const std::optional<Tensor> lse_holder = AttentionTensors::contiguous_or_none(other_lse);
  p.other_lse = static_cast<const float*>(data_or_null(lse_holder));
  if (lse) p.lse = static_cast<float*>(lse->data_ptr());
  p.pages = pages;
  if (pages) p.capacity = pages.capacity;
  p.group_inverse = inverse_of(p.group);
  p.num_kv_heads_inverse = inverse_of(p.num_kv_heads);
  p.kv_type = type;
  if (k_scales) p.k_scales = static_cast<const uint16_t*>(k_scales->data_ptr());
  if (v_scales) p.v_scales = static_cast<const uint16_t*>(v_scales->data_ptr());

  const int64_t needed = decode_attention_workspace_bytes(p);
  Tensor scratch =
      workspace ? *workspace : empty_like_with_sizes(tensors.q, {needed / element_size(p.dtype)});
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
  return tensors.out;
}

}  // namespace hf_fastpath
