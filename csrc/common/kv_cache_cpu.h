// What the two ops that touch the KV cache share on the CPU: the checked cache arguments. This header is
// torch-facing, and *_cpu.cpp alone include it.
#pragma once

#include <algorithm>

#include "common/cpu_glue.h"
#include "common/pages_glue.h"

namespace hf_fastpath {

struct KvCache {
  KvType type;
  void* k;  // [batch, num_kv_heads, capacity, head_dim], or with `pages` [pages, num_kv_heads, page_size,
            // head_dim]
  void* v;
  uint16_t* k_scales;  // bfloat16 [batch, num_kv_heads, capacity], or null
  uint16_t* v_scales;
  int64_t num_kv_heads, capacity, head_dim;
  const int32_t* pages;  // [batch, capacity / page_size]: the page of each slot's block; or null
  int64_t page_size;
  int64_t
      page_count;  // pages of the caches; 0 where a kv_table says where they lie, but not how many there are
};

// Refuses a block table whose entries for positions [begin, end) of batch row `row` are no pages.
inline void check_pages(const KvCache& cache, int64_t row, int64_t begin, int64_t end, const char* op) {
  if (cache.pages == nullptr || cache.page_count == 0 || begin >= end) return;
  const int64_t columns = cache.capacity / cache.page_size;
  const auto block_of = [&](int64_t position) {
    return (position - (position < 0 ? cache.page_size - 1 : 0)) / cache.page_size;
  };
  const int64_t first = block_of(begin), count = std::min(block_of(end - 1) - first + 1, columns);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t column = ((first + i) % columns + columns) % columns;
    const int32_t page = cache.pages[row * columns + column];
    STD_TORCH_CHECK(page >= 0 && page < cache.page_count, "hf_fastpath::", op, ": block_table[", row, ", ",
                    column, "] is ", page, ", expected a page from 0 to ", cache.page_count - 1);
  }
}

// The caches, or the addresses and the capacity in row `layer` of kv_table in their place.
inline KvCache load_kv_cache(const Tensor& k_cache, const Tensor& v_cache,
                             const std::optional<Tensor>& k_scales, const std::optional<Tensor>& v_scales,
                             const std::optional<Tensor>& kv_table, int64_t layer,
                             const std::optional<Tensor>& block_table, int64_t batch, const char* op) {
  const KvType type = kv_type_of(k_cache, op);
  STD_TORCH_CHECK(k_cache.dim() == 4 && v_cache.dim() == 4 && (block_table || k_cache.size(0) == batch),
                  "hf_fastpath::", op, ": the caches have to be [batch, kv_heads, capacity, head_dim]");
  for (int64_t i = 0; i < 4; ++i) {
    STD_TORCH_CHECK(k_cache.size(i) == v_cache.size(i), "hf_fastpath::", op,
                    ": k_cache and v_cache differ in shape");
  }
  STD_TORCH_CHECK(kv_type_of(v_cache, op) == type, "hf_fastpath::", op,
                  ": k_cache and v_cache differ in dtype");
  STD_TORCH_CHECK(k_cache.is_contiguous() && v_cache.is_contiguous(), "hf_fastpath::", op,
                  ": k_cache and v_cache have to be contiguous");
  check_kv_scales(k_cache, k_scales, type, op, "k_scales");
  check_kv_scales(k_cache, v_scales, type, op, "v_scales");
  const Pages pages = load_pages(block_table, kv_table, layer, k_cache, type, batch, op);
  KvCache cache{type,
                k_cache.mutable_data_ptr(),
                v_cache.mutable_data_ptr(),
                k_scales ? static_cast<uint16_t*>(k_scales->mutable_data_ptr()) : nullptr,
                v_scales ? static_cast<uint16_t*>(v_scales->mutable_data_ptr()) : nullptr,
                k_cache.size(1),
                k_cache.size(2),
                k_cache.size(3),
                nullptr,
                k_cache.size(2),
                kv_table ? 0 : k_cache.size(0)};
  if (pages) {
    cache.pages = pages.table;
    cache.capacity = pages.capacity;
  }
  if (kv_table.has_value()) {
    if (!pages) check_kv_table(kv_table, layer, type, op);
    const auto* row = static_cast<const int64_t*>(kv_table->const_data_ptr()) + layer * kv_table->stride(0);
    const int64_t step = kv_table->stride(1);
    cache.k = reinterpret_cast<void*>(row[0]);
    cache.v = reinterpret_cast<void*>(row[step]);
    cache.capacity = row[2 * step];
    if (is_quantized(type)) {
      cache.k_scales = reinterpret_cast<uint16_t*>(row[3 * step]);
      cache.v_scales = reinterpret_cast<uint16_t*>(row[4 * step]);
    }
    if (pages) cache.pages = reinterpret_cast<const int32_t*>(row[3 * step]);
  }
  STD_TORCH_CHECK(cache.capacity > 0 && cache.num_kv_heads > 0 && cache.head_dim > 0 && cache.k != nullptr &&
                      cache.v != nullptr,
                  "hf_fastpath::", op, ": the cache is empty");
  return cache;
}

// Data of an int32 [batch] tensor; `holder` keeps a contiguous copy alive if one is made.
inline const int32_t* load_int_vector(const Tensor& tensor, int64_t batch, std::optional<Tensor>& holder,
                                      const char* op, const char* name) {
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Int && tensor.dim() == 1 && tensor.size(0) == batch,
                  "hf_fastpath::", op, ": ", name, " has to be int32 with ", batch, " elements");
  holder = hf_fastpath::contiguous(tensor);
  return static_cast<const int32_t*>(holder->const_data_ptr());
}

}  // namespace hf_fastpath
