// What: adds the bias, rotates the new queries and keys (half-split pairs, or neighbors), writes keys and
// values into their
//   cache slots and the queries to q_out; one rounding to each destination's type.
// Work split: a thread takes kElems pairs of a head of a token: elements p and p + rotary_dim / 2 of the
//   rotated part, neighboring runs of the rest and of a part whose neighbors turn together; 16 bytes at a
//   time where shapes allow it. grid.x counts the tokens of all rows, grid.y covers the pairs of a token.
// Traffic: qkv, bias, cos and sin read once, q_out and the new cache slots written once.
// Roofline: latency of two dependent loads (the table or the lengths, then the slot's address); a few KB a
//   token. 1.8 us for one token of 32/8 heads of 128, float16, in a CUDA graph (H200, 2026-11).

#include "common/async.cuh"
#include "common/cuda_check.cuh"
#include "rope_append/rope_append.cuh"
#include "rope_append/rope_append_paged.h"

namespace hf_fastpath {
namespace {

constexpr int kThreads = 128;  // small blocks: a token has a few thousand pairs, which should reach many SMs

template <class T, int kElems>
__device__ __forceinline__ void load_floats(const T* from, float (&to)[kElems]) {
  Chunk<T, kElems>::unpack(Chunk<T, kElems>::load(from), to);
}

// Turns the pairs of a run of elements.
template <class T, int kElems>
__device__ __forceinline__ void turn_neighbors(const T* cos, const T* sin, float (&values)[kElems]) {
  float c[kElems], s[kElems];
  load_floats(cos, c), load_floats(sin, s);
#pragma unroll
  for (int e = 0; e + 1 < kElems; e += 2) {
    turn_pair({c[e], c[e + 1]}, {s[e], s[e + 1]}, values[e], values[e + 1]);
  }
}

// As cache_place(p), which also finds the table of the pages.
__device__ __forceinline__ CachePlace cache_place(const RopeAppendParams& p, Pages& pages) {
  if (!p.kv_table) return {static_cast<char*>(p.k_cache), static_cast<char*>(p.v_cache), pages.capacity};
  const int64_t* entry = p.kv_table + kPagedTableColumns * p.layer;
  pages.table = reinterpret_cast<const int32_t*>(entry[3]);
  return {reinterpret_cast<char*>(entry[0]), reinterpret_cast<char*>(entry[1]), entry[2]};
}

// Where a token's head goes in a cache, counted in heads of a token.
__device__ __forceinline__ int64_t head_place(const RopeAppendParams& p, int64_t capacity, int64_t slot,
                                              int row, int kv_head) {
  return (int64_t(row) * p.num_kv_heads + kv_head) * capacity + slot;
}

// Of an entry of the block table that is no page.
constexpr int64_t kNowhere = -1;

__device__ __forceinline__ int64_t head_place(const RopeAppendParams& p, int64_t capacity, int64_t slot,
                                              int row, int kv_head, const Pages& pages) {
  const uint32_t page = pages.table[row * (capacity >> pages.shift) + (slot >> pages.shift)];
  if (page > pages.last) return kNowhere;
  return ((int64_t(page) * p.num_kv_heads + kv_head) << pages.shift) + (slot & ((1 << pages.shift) - 1));
}

// Stores neighbors in a cache; `at_once`: it is aligned to 16 bytes.
template <class Cache, int kElems>
__device__ __forceinline__ void store_neighbors(Cache* to, const float (&values)[kElems], bool at_once) {
  if (at_once) return Chunk<Cache, kElems>::store(to, values);
#pragma unroll
  for (int e = 0; e < kElems; ++e) to[e] = from_float<Cache>(values[e]);
}

// MaybePages: Pages, or nothing. The kernel in front may still run.
template <class T, class Cache, int kElems, class... MaybePages>
__global__ void __launch_bounds__(kThreads) rope_append_kernel(RopeAppendParams p, MaybePages... pages) {
  const int units = (p.head_dim + 1) / 2 / kElems;  // of a head; an odd head_dim leaves one element alone
  const int heads = p.num_heads + 2 * p.num_kv_heads;
  const int index = blockIdx.y * kThreads + threadIdx.x;
  if (index >= heads * units) return;
  allow_next_kernel();
  const int head = index / units, unit = index % units;
  const int token = blockIdx.x, row = token / p.query_len;

  const bool is_value = head >= p.num_heads + p.num_kv_heads;
  const int half = is_value ? 0 : p.rotary_dim / 2;
  const bool rotate = unit * kElems < half, is_split = rotate && !p.neighbors;
  const int first =
      is_split ? unit * kElems : 2 * unit * kElems;  // what is not rotated starts at element 2 * half
  const int second = first + (is_split ? half : kElems);
  const bool has_second = kElems > 1 || second < p.head_dim;

  const int64_t features = int64_t(heads) * p.head_dim, column = int64_t(head) * p.head_dim;
  const CachePlace place = cache_place(p, pages...);
  const int64_t slot = cache_slot(p, place.capacity, token);
  int64_t kv_place = 0;  // of a key or value
  if (head >= p.num_heads) {
    const int kv_head = head - p.num_heads - (is_value ? p.num_kv_heads : 0);
    kv_place = head_place(p, place.capacity, slot, row, kv_head, pages...);
  }
  wait_for_previous_kernel();  // the projections
  drop_l1();
  const T* qkv = static_cast<const T*>(p.qkv) + token * features + column;
  float a[kElems], b[kElems] = {};
  load_floats(qkv + first, a);
  if (has_second) load_floats(qkv + second, b);
  if (p.bias) {
    const T* bias = static_cast<const T*>(p.bias) + column;
    float more[kElems];
    load_floats(bias + first, more);
#pragma unroll
    for (int e = 0; e < kElems; ++e) a[e] += more[e];
    if (has_second) {
      load_floats(bias + second, more);
#pragma unroll
      for (int e = 0; e < kElems; ++e) b[e] += more[e];
    }
  }
  if (rotate) {
    const T* cos = token_angles<T>(p, p.cos, token);
    const T* sin = token_angles<T>(p, p.sin, token);
    if (kElems == 1 || !p.neighbors) {
      float cos_a[kElems], cos_b[kElems], sin_a[kElems], sin_b[kElems];
      load_floats(cos + first, cos_a), load_floats(cos + second, cos_b);
      load_floats(sin + first, sin_a), load_floats(sin + second, sin_b);
#pragma unroll
      for (int e = 0; e < kElems; ++e) {
        turn_pair({cos_a[e], cos_b[e]}, {sin_a[e], sin_b[e]}, a[e], b[e]);
      }
    } else {
      turn_neighbors(cos + first, sin + first, a);
      turn_neighbors(cos + second, sin + second, b);
    }
  }

  if (head < p.num_heads) {
    T* out = static_cast<T*>(p.q_out) + (int64_t(token) * p.num_heads + head) * p.head_dim;
    Chunk<T, kElems>::store(out + first, a);
    if (has_second) Chunk<T, kElems>::store(out + second, b);
    return;
  }
  if constexpr (sizeof...(MaybePages) > 0) {
    if (kv_place == kNowhere) return;
  }
  char* const cache = is_value ? place.v_cache : place.k_cache;
  const bool at_once = kElems == 1 || reinterpret_cast<uintptr_t>(cache) % 16 == 0;
  Cache* out = reinterpret_cast<Cache*>(cache) + kv_place * p.head_dim;
  store_neighbors(out + first, a, at_once);
  if (has_second) store_neighbors(out + second, b, at_once);
}

// Whether every run of kElems elements starts a 16-byte access where the caches do; the kernel looks at
// these, whose addresses may be in a kv_table.
template <int kElems>
bool is_aligned(const RopeAppendParams& p) {
  for (const void* start : {p.qkv, p.bias, p.cos, p.sin, static_cast<const void*>(p.q_out)}) {
    if (!is_aligned16(start)) return false;
  }
  return p.head_dim % (2 * kElems) == 0 && p.rotary_dim % (2 * kElems) == 0;
}

template <class T, class Cache, int kElems, class... MaybePages>
void launch(const RopeAppendParams& params, bool programmatic_launch, cudaStream_t stream,
            const MaybePages&... pages) {
  const int units = (params.num_heads + 2 * params.num_kv_heads) * ((params.head_dim + 1) / 2 / kElems);
  const dim3 grid(params.batch * params.query_len, (units + kThreads - 1) / kThreads), block(kThreads);
  const size_t smem_bytes = 0;
  const auto kernel = rope_append_kernel<T, Cache, kElems, MaybePages...>;
  HF_FASTPATH_CUDA_CHECK(
      launch_programmatic(kernel, grid, block, smem_bytes, stream, programmatic_launch, params, pages...));
}

template <class... MaybePages>
void launch_typed(const RopeAppendParams& params, bool programmatic_launch, cudaStream_t stream,
                  const MaybePages&... pages) {
  if (params.batch * params.query_len == 0 || params.head_dim == 0) return;
  if (params.num_heads + params.num_kv_heads == 0) return;
  with_type(params.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (params.kv_type == kv_type(params.dtype) && is_aligned<kVecElems<T>>(params)) {
      return launch<T, T, kVecElems<T>>(params, programmatic_launch, stream, pages...);
    }
    with_type(static_cast<DType>(params.kv_type), [&](auto cache_zero) {
      launch<T, decltype(cache_zero), 1>(params, programmatic_launch, stream, pages...);
    });
  });
}

}  // namespace

void launch_rope_append(const RopeAppendParams& params, bool programmatic_launch, cudaStream_t stream) {
  if (!is_quantized(params.kv_type)) return launch_typed(params, programmatic_launch, stream);
  if (params.batch * params.query_len == 0 || params.head_dim == 0) return;
  if (params.num_heads + params.num_kv_heads == 0) return;
  launch_rope_append_quants(params, stream);
}

void launch_rope_append_paged(const RopeAppendParams& params, const Pages& pages, bool programmatic_launch,
                              cudaStream_t stream) {
  launch_typed(params, programmatic_launch, stream, pages);
}

}  // namespace hf_fastpath
