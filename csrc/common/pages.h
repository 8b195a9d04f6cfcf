// Caches in pages: [pages, num_kv_heads, page size, head_dim], and a block table that says in which page each
// block of a sequence's slots lies; see hf_fastpath/ops/decode_attention.py.
#pragma once

#include <cstdint>

namespace hf_fastpath {

// A page has at least so many positions, and a power of two.
constexpr int64_t kMinPageSize = 16;
// Columns of a kv_table of caches in pages: address of K, address of V, capacity, address of the block table.
constexpr int64_t kPagedTableColumns = 4;

struct Pages {
  const int32_t* table = nullptr;  // [batch, capacity >> shift]; null: the cache is not in pages
  int64_t capacity = 0;            // slots of a sequence
  int shift = 0;                   // log2 of the page size
  // The largest page that the table may name: kernels take a larger entry for it, or write nothing. Where a
  // kv_table says where the pages lie, it is not known here: the table is then the decode plan's own.
  uint32_t last = 0;

  explicit operator bool() const { return table != nullptr; }
};

}  // namespace hf_fastpath
