// Decode attention on the CPU: kernel interface, free of torch.
#pragma once

#include "common/dtype.h"

namespace hf_fastpath {

constexpr int64_t kMaxQueryLen = 16;

// A chunk of the cache of one KV head, and where its partial result goes.
struct AttentionChunk {
  KvType kv_type;
  int64_t head_dim;  // a multiple of 8
  int64_t capacity;  // slots; position j lies in slot j % capacity
  const void* k;     // [capacity, head_dim] of this batch row and KV head; with `pages` of page 0's head
  const void* v;
  const uint16_t* k_scales;  // bfloat16 [capacity] of quantized caches, else null
  const uint16_t* v_scales;
  const int32_t* pages;            // of this batch row: page of every page_size slots; or null
  int64_t page_size, page_stride;  // slots of a page; rows of head_dim from a page to the next
  int64_t begin, end;              // positions of the chunk
  int64_t query_len;               // tokens
  int64_t group;                   // query heads that share the KV head
  const float* q;                  // [query_len * group, head_dim]
  const int16_t* q_steps;          // the same in steps, for score_block_avx512_vnni; or null
  const float* q_units;            // [query_len * group], the size of a query's steps
  int64_t first_query;  // position of token 0; token i sees the positions up to first_query + i ...
  int64_t window;       // ... and from first_query + i - window + 1 on, unless 0
  float scale;
  float softcap;        // of scores, cap * tanh(score / cap); 0: none
  const float* slopes;  // [group]: added to a score for each position that a key is further on; or null
  const float* biases;  // [group, distances]: added to a score of a key so far behind the one token; or null
  int64_t distances;    // the last bias holds of all keys that are further behind
  float* accumulators;  // [query_len * group, head_dim]: sum of exp(score - max) * v over the chunk
  float* maxima;        // [query_len * group]: largest score, -infinity if no position is visible
  float* weights;       // [query_len * group]: sum of exp(score - max)
  float* scratch;       // attention_scratch_floats(query_len * group) floats, 64-byte aligned
};

// Row of K and V, and scale, of a position. Internal linkage: AVX2 code must not be merged with it.
[[maybe_unused]] static inline int64_t row_of(const AttentionChunk& chunk, int64_t position) {
  const int64_t slot = position % chunk.capacity;
  if (chunk.pages == nullptr) return slot;
  return chunk.pages[slot / chunk.page_size] * chunk.page_stride + slot % chunk.page_size;
}

// Positions whose scores are held at a time. The K and V of a block have to stay in the first-level cache
// between the loads that share them, and the softmax is vectorized over it.
constexpr int64_t kBlockPositions = 64;

// Scores of a block, and the largest of each query.
constexpr int64_t attention_scratch_floats(int64_t queries) {
  return queries * kBlockPositions + (queries + 15) / 16 * 16;
}

// What a block of an int8 cache takes from K or V, see BlockRows.
struct Int8Rows {
  const int8_t* base;
  int64_t apart, stride;
};

// Scores, and product with V, of a block in integers: for head_dim a multiple of 32. The second does nothing
// and returns false where weights are not finite, or too small.
void score_block_avx512_vnni(const Int8Rows& k, int64_t count, const int16_t* q, const float* units,
                             int64_t queries, int64_t head_dim, float* scores, const Int8Rows& ahead);
bool value_block_avx512_vnni(const Int8Rows& v, int64_t count, const float* weights, int64_t queries,
                             int64_t head_dim, float* accumulators, const Int8Rows& ahead);

void attention_chunk_portable(const AttentionChunk& chunk);
void attention_chunk_avx2(const AttentionChunk& chunk);
void attention_chunk_avx512(const AttentionChunk& chunk);  // head_dim a multiple of 16

// out[d] = sum over parts of accumulators * exp(max - M) / (sum of weights * exp(max - M) + exp(sink - M)),
// with M the largest of the maxima and `sink`; zeros if nothing is visible. A sink of -infinity is none. The
// parts of accumulators lie `accumulator_stride` floats apart, those of maxima and weights `stat_stride`;
// maxima are overwritten.
void attention_merge_portable(DType dtype, const float* accumulators, float* maxima, const float* weights,
                              int64_t parts, int64_t accumulator_stride, int64_t stat_stride,
                              int64_t head_dim, float sink, void* out);
void attention_merge_avx2(DType dtype, const float* accumulators, float* maxima, const float* weights,
                          int64_t parts, int64_t accumulator_stride, int64_t stat_stride, int64_t head_dim,
                          float sink, void* out);

}  // namespace hf_fastpath
