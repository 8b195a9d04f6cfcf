// The block table of an op's arguments, checked. This header is torch-facing.
#pragma once

#include <optional>

#include "common/pages.h"
#include "common/torch_glue.h"

namespace hf_fastpath {

// Checks the table, and columns and row of the kv_table that goes with it, if there is one.
inline Pages load_pages(const std::optional<Tensor>& block_table, const std::optional<Tensor>& kv_table,
                        int64_t layer, const Tensor& cache, KvType type, int64_t batch, const char* op) {
  if (!block_table) return {};
  STD_TORCH_CHECK(
      cache.dim() == 4 && !is_quantized(type), "hf_fastpath::", op,
      ": with a block_table the caches have to be [pages, kv_heads, page_size, head_dim] of floats");
  const int64_t size = cache.size(2);
  STD_TORCH_CHECK(size >= kMinPageSize && (size & (size - 1)) == 0, "hf_fastpath::", op, ": page_size is ",
                  size, ", expected a power of two from ", kMinPageSize, " on");
  STD_TORCH_CHECK(
      block_table->scalar_type() == ScalarType::Int && block_table->dim() == 2 &&
          block_table->size(0) == batch && block_table->size(1) > 0 && block_table->is_contiguous(),
      "hf_fastpath::", op, ": block_table has to be contiguous int32 [", batch, ", pages of a sequence]");
  STD_TORCH_CHECK(
      !kv_table || (kv_table->scalar_type() == ScalarType::Long && kv_table->dim() == 2 &&
                    kv_table->size(1) == kPagedTableColumns && layer >= 0 && layer < kv_table->size(0)),
      "hf_fastpath::", op, ": with a block_table kv_table has to be int64 [layers, ", kPagedTableColumns,
      "] with layer inside, layer is ", layer);
  STD_TORCH_CHECK(kv_table || (cache.size(0) > 0 && cache.size(0) <= INT32_MAX), "hf_fastpath::", op,
                  ": k_cache has ", cache.size(0), " pages, expected one or more");
  return {static_cast<const int32_t*>(block_table->data_ptr()), size * block_table->size(1),
          __builtin_ctzll(static_cast<uint64_t>(size)),
          kv_table ? UINT32_MAX : static_cast<uint32_t>(cache.size(0) - 1)};
}

}  // namespace hf_fastpath
