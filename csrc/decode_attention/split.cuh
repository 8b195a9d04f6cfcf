// How a KV head's visible positions are split over blocks; merge.cuh makes one of the blocks' results. The
// grid depends on shapes alone; how many of its blocks have work is computed on the device from the
// lengths there.
#pragma once

#include "common/async.cuh"
#include "common/cuda_check.cuh"
#include "common/lengths.h"
#include "decode_attention/decode_attention.h"

namespace hf_fastpath {

constexpr int kMinChunk = 64;       // positions of a split: fewer cost more in merging than they save
constexpr int kChunkMultiple = 16;  // chunks end on whole warp steps

constexpr int kSharedBytesEverywhere = 99 * 1024;  // that a block may have, from sm_80 on

// Positions one block handles, of one row of the batch and one KV head.
struct Split {
  int seq_len, start;             // of the row; start: first position padding leaves visible
  int begin, end;                 // positions of this block
  int active;                     // splits that have work, at least 1
  uint32_t capacity, first_slot;  // slots of a cache row; slot of `begin`
  const char* k;                  // this row's and head's cache; in pages, this head's of page 0
  const char* v;

  // First position that the token at `position` sees.
  __device__ __forceinline__ int first_visible(int position, int window) const {
    return window > 0 ? max(start, position - window + 1) : start;
  }
};

// A split and where its positions lie.
template <bool kPaged>
struct PlacedSplit : Split {
  static constexpr bool kIsPaged = false;

  // Rows of `k` and `v`, counted from there: position begin + i, i < capacity, lies in this one,
  __device__ __forceinline__ uint32_t slot(int i) const {
    const uint32_t slot = first_slot + i;
    return slot < capacity ? slot : slot - capacity;
  }
  // and so many from it on lie one after the other.
  __device__ __forceinline__ int adjacent(uint32_t slot) const { return capacity - slot; }
};

template <>
struct PlacedSplit<true> : Split {
  static constexpr bool kIsPaged = true;
  const int32_t* pages;  // of this row of the batch: page of each block of slots
  int page_shift;        // log2 of a block's slots
  uint32_t page_stride;  // rows from a page to the next
  uint32_t last_page;    // see Pages

  __device__ __forceinline__ uint32_t slot(int i) const {
    uint32_t slot = first_slot + i;
    if (slot >= capacity) slot -= capacity;
    const uint32_t page = min(uint32_t(__ldg(pages + (slot >> page_shift))), last_page);
    return page * page_stride + (slot & ((1u << page_shift) - 1));
  }
  __device__ __forceinline__ int adjacent(uint32_t slot) const {
    const uint32_t size = 1u << page_shift;
    return size - (slot & (size - 1));
  }
};

// `alone`: positions that one block takes without a split. Chunks are multiples of kMultiple.
template <bool kPaged, int kMultiple = kChunkMultiple>
__device__ __forceinline__ PlacedSplit<kPaged> find_split(const DecodeAttentionParams& p, int row,
                                                          int kv_head, int split, unsigned splits,
                                                          unsigned alone, int kv_elem_bytes) {
  PlacedSplit<kPaged> s;
  s.seq_len = bounded_length(__ldg(p.seq_lens + row));
  s.start = p.starts ? max(__ldg(p.starts + row), 0) : 0;
  const char* k = static_cast<const char*>(p.k_cache);
  const char* v = static_cast<const char*>(p.v_cache);
  int64_t capacity = p.capacity;
  if (p.kv_table) {
    const int64_t columns = kPaged               ? kPagedTableColumns
                            : kv_elem_bytes == 1 ? kQuantizedTableColumns
                                                 : kTableColumns;
    const int64_t* entry = p.kv_table + columns * p.layer;
    k = reinterpret_cast<const char*>(__ldg(reinterpret_cast<const long long*>(entry)));
    v = reinterpret_cast<const char*>(__ldg(reinterpret_cast<const long long*>(entry) + 1));
    capacity = __ldg(reinterpret_cast<const long long*>(entry) + 2);
    if constexpr (kPaged) {
      s.pages = reinterpret_cast<const int32_t*>(__ldg(reinterpret_cast<const long long*>(entry) + 3));
    }
  }
  s.capacity = static_cast<uint32_t>(capacity);
  uint32_t first_head = row * p.num_kv_heads + kv_head, head_rows = s.capacity;
  if constexpr (kPaged) {
    if (!p.kv_table) s.pages = p.pages.table;
    s.pages += row * (s.capacity >> p.pages.shift);
    s.page_shift = p.pages.shift;
    s.last_page = p.pages.last;
    first_head = kv_head, head_rows = 1u << p.pages.shift;
    s.page_stride = head_rows * p.num_kv_heads;
  }
  const uint64_t head_offset = uint64_t(first_head) * head_rows * uint32_t(p.head_dim * kv_elem_bytes);
  s.k = k + head_offset;
  s.v = v + head_offset;
  // What the first token sees bounds what any sees; a ring holds no more than its capacity. A start may be
  // any number.
  const int visible = max(s.first_visible(s.seq_len - p.query_len, p.window), s.seq_len - int(s.capacity));
  const int first = bounded_length(visible, s.seq_len);
  const unsigned length = s.seq_len - first;  // unsigned numbers take fewer instructions to divide
  unsigned chunk = max((length + splits - 1) / splits, unsigned(length <= alone ? alone : kMinChunk));
  chunk = (chunk + kMultiple - 1) / kMultiple * kMultiple;
  s.active = length > 0 ? int((length + chunk - 1) / chunk) : 1;  // the chunk of no positions may be 0
  s.begin = first + split * chunk;
  s.end = min(s.begin + chunk, s.seq_len);
  s.first_slot = static_cast<uint32_t>(s.begin) % s.capacity;
  return s;
}

// Scales of a quantized cache's positions, of one row and KV head, by slot.
struct Scales {
  const uint16_t *k, *v;
};

__device__ __forceinline__ Scales find_scales(const DecodeAttentionParams& p, const Split& s, int row,
                                              int kv_head) {
  const uint16_t *k = p.k_scales, *v = p.v_scales;
  if (p.kv_table) {
    const auto* entry = reinterpret_cast<const long long*>(p.kv_table + kQuantizedTableColumns * p.layer);
    k = reinterpret_cast<const uint16_t*>(__ldg(entry + 3));
    v = reinterpret_cast<const uint16_t*>(__ldg(entry + 4));
  }
  const uint64_t offset = uint64_t(uint32_t(row * p.num_kv_heads + kv_head)) * s.capacity;
  return {k + offset, v + offset};
}

// number / divisor, where `inverse` is inverse_of(divisor).
__device__ __forceinline__ int divide(int number, uint32_t inverse) {
  return static_cast<int>(uint64_t(uint32_t(number)) * inverse >> 31);
}

// Queries that share a KV head's cache.
__host__ __device__ inline int rows_per_kv_head(const DecodeAttentionParams& p) {
  return p.group * p.query_len;
}

// A block's rows: queries of one KV head.
struct Rows {
  int first, most;

  __device__ __forceinline__ int count(const DecodeAttentionParams& p) const {
    return min(most, rows_per_kv_head(p) - first);
  }
};

// A row's place: which query of which head, and what it sees.
struct RowPlace {
  int token, head;  // query of query_len; query head
  bool sees_any;    // some position is visible to it
};

__device__ __forceinline__ RowPlace row_place(const DecodeAttentionParams& p, const Split& s, int kv_head,
                                              int row) {
  RowPlace place;
  place.token = divide(row, p.group_inverse);
  place.head = kv_head * p.group + row - place.token * p.group;
  const int position = s.seq_len - p.query_len + place.token;
  place.sees_any = position >= max(s.first_visible(position, p.window), 0);
  return place;
}

// Index of a row in the order of q and the output.
__device__ __forceinline__ int output_row(const DecodeAttentionParams& p, int batch_row,
                                          const RowPlace& place) {
  return (batch_row * p.query_len + place.token) * p.num_heads + place.head;
}

__device__ __forceinline__ int64_t out_offset(const DecodeAttentionParams& p, int batch_row,
                                              const RowPlace& place) {
  return uint64_t(uint32_t(output_row(p, batch_row, place))) * uint32_t(p.head_dim);
}

// Splits to launch for `units` independent pieces of work when `slots` blocks run at once and a piece can be
// cut into at most `most`: the smallest number whose waves are within 5 % of the best.
inline int choose_splits(int64_t units, int64_t slots, int64_t most) {
  const auto time = [&](int64_t splits) {
    return static_cast<double>((units * splits + slots - 1) / slots) / static_cast<double>(splits);
  };
  most = most < 1 ? 1 : most > kMaxSplits ? kMaxSplits : most;
  double best = time(1);
  for (int64_t splits = 2; splits <= most; ++splits) best = time(splits) < best ? time(splits) : best;
  int64_t splits = 1;
  while (splits < most && time(splits) > 1.05 * best) ++splits;
  return static_cast<int>(splits);
}

// The most pieces a cache of this size can be cut into; with a table its size is not known here.
inline int64_t most_splits(const DecodeAttentionParams& p) {
  int64_t longest = p.kv_table ? int64_t(kMaxSplits) * kMinChunk : p.capacity;
  if (p.window > 0 && p.window + p.query_len - 1 < longest) longest = p.window + p.query_len - 1;
  return (longest + kMinChunk - 1) / kMinChunk;
}

// Grid (splits, KV heads * blocks of rows, batch rows) when an SM runs `blocks_per_sm` blocks of kRows rows
// at once.
inline dim3 split_grid(const DecodeAttentionParams& p, int rows_per_block, int blocks_per_sm) {
  const int row_blocks = (rows_per_kv_head(p) + rows_per_block - 1) / rows_per_block;
  const int64_t units = int64_t(p.batch) * p.num_kv_heads * row_blocks;
  const int64_t slots = int64_t(multiprocessor_count()) * blocks_per_sm;
  return dim3(choose_splits(units, slots, most_splits(p)), p.num_kv_heads * row_blocks, p.batch);
}

inline void launch_attention(void (*kernel)(DecodeAttentionParams), dim3 grid, dim3 block, size_t smem_bytes,
                             cudaStream_t stream, const DecodeAttentionParams& p) {
  allow_shared_memory(kernel, smem_bytes);
  HF_FASTPATH_CUDA_CHECK(
      launch_programmatic(kernel, grid, block, smem_bytes, stream, p.programmatic_launch, p));
}

}  // namespace hf_fastpath
