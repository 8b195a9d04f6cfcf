// What: adds the bias, norms (if asked for) and rotates the new queries and keys (half-split pairs, or
//   neighbors), writes keys and values into their cache slots and the queries to q_out; one rounding to each
//   destination's type.
// Work split: a thread takes kElems pairs of a head of a token: elements p and p + rotary_dim / 2 of the
//   rotated part, neighboring runs of the rest and of a part whose neighbors turn together; 16 bytes at a
//   time where shapes allow it. grid.x counts the tokens of all rows, grid.y covers the pairs of a token.
// Traffic: q, k, v, bias, cos and sin read once, q_out and the new cache slots written once.
// Roofline: latency of two dependent loads (the table or the lengths, then the slot's address); a few KB a
//   token. 1.8 us for one token of 32/8 heads of 128, float16, in a CUDA graph (H200, 2026-11).

#include <algorithm>

#include "common/async.cuh"
#include "common/cuda_check.cuh"
#include "common/inverse_root.cuh"
#include "common/warp.cuh"
#include "rope_append/rope_append.cuh"
#include "rope_append/rope_append_paged.h"

namespace hf_fastpath {
namespace {

constexpr int kThreads = 128;  // small blocks: a token has a few thousand pairs, which should reach many SMs
constexpr int kHeadsOfBlock = 4;        // if a warp norms a head, so that blocks of prompts fill an SM
constexpr int kMaxNormedThreads = 512;  // of a norm of all heads; more would leave too few registers for each

// kL2: past L1, which may hold older values; see wait_for_previous_kernel().
template <bool kL2 = false, class T, int kElems>
__device__ __forceinline__ void load_floats(const T* from, float (&to)[kElems]) {
  using C = Chunk<T, kElems>;
  C::unpack(kL2 ? C::load_l2(from) : C::load(from), to);
}

template <int kElems>
__device__ __forceinline__ float sum_of_squares(const float (&a)[kElems], const float (&b)[kElems]) {
  float sum = 0.f;
#pragma unroll
  for (int e = 0; e < kElems; ++e) sum = fmaf(a[e], a[e], fmaf(b[e], b[e], sum));
  return sum;
}

// Turns the pairs of a run of elements.
template <int kElems>
__device__ __forceinline__ void turn_neighbors(const float (&c)[kElems], const float (&s)[kElems],
                                               float (&values)[kElems]) {
#pragma unroll
  for (int e = 0; e + 1 < kElems; e += 2) {
    turn_pair({c[e], c[e + 1]}, {s[e], s[e + 1]}, values[e], values[e + 1]);
  }
}

// The same as cache_place(p), which also finds the table of the pages.
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

// This is the value of an entry of the block table that is no page.
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

// Angles of the two runs of a unit, as they lie in memory.
template <class T, int kElems>
struct Angles {
  typename Chunk<T, kElems>::Raw cos[2], sin[2];
};

// Two runs of kElems elements of a head: those that turn together, neighboring runs of elements that turn
// with their neighbors, or of the rest.
template <int kElems>
struct Unit {
  int first, second;
  bool turns, has_second;

  // rotary_dim: 0 of a value.
  __device__ __forceinline__ Unit(const RopeAppendParams& p, int unit, int rotary_dim) {
    const int half = rotary_dim / 2;
    turns = unit * kElems < half;
    const bool is_split = turns && !p.neighbors;
    first = is_split ? unit * kElems : 2 * unit * kElems;  // what does not turn starts at element 2 * half
    second = first + (is_split ? half : kElems);
    has_second = kElems > 1 || second < p.head_dim;
  }

  // The head's elements, with the bias if there is one.
  template <bool kL2 = false, class T>
  __device__ __forceinline__ void load(const T* head, const T* bias, float (&a)[kElems],
                                       float (&b)[kElems]) const {
    load_floats<kL2>(head + first, a);
    if (has_second) load_floats<kL2>(head + second, b);
    if (!bias) return;
    float more[kElems];
    load_floats(bias + first, more);
#pragma unroll
    for (int e = 0; e < kElems; ++e) a[e] += more[e];
    if (!has_second) return;
    load_floats(bias + second, more);
#pragma unroll
    for (int e = 0; e < kElems; ++e) b[e] += more[e];
  }

  template <bool kL2 = false, class T>
  __device__ __forceinline__ void load_angles(const RopeAppendParams& p, int token,
                                              Angles<T, kElems>& angles) const {
    if (!turns) return;
    using C = Chunk<T, kElems>;
    const T* cos = token_angles<T>(p, p.cos, token);
    const T* sin = token_angles<T>(p, p.sin, token);
#pragma unroll
    for (int run = 0; run < 2; ++run) {
      const int i = run ? second : first;
      angles.cos[run] = kL2 ? C::load_l2(cos + i) : C::load(cos + i);
      angles.sin[run] = kL2 ? C::load_l2(sin + i) : C::load(sin + i);
    }
  }

  template <class T>
  __device__ __forceinline__ void turn(const RopeAppendParams& p, const Angles<T, kElems>& angles,
                                       float (&a)[kElems], float (&b)[kElems]) const {
    if (!turns) return;
    using C = Chunk<T, kElems>;
    float cos_a[kElems], cos_b[kElems], sin_a[kElems], sin_b[kElems];
    C::unpack(angles.cos[0], cos_a), C::unpack(angles.cos[1], cos_b);
    C::unpack(angles.sin[0], sin_a), C::unpack(angles.sin[1], sin_b);
    if (kElems == 1 || !p.neighbors) {
#pragma unroll
      for (int e = 0; e < kElems; ++e) {
        turn_pair({cos_a[e], cos_b[e]}, {sin_a[e], sin_b[e]}, a[e], b[e]);
      }
    } else {
      turn_neighbors(cos_a, sin_a, a);
      turn_neighbors(cos_b, sin_b, b);
    }
  }

  // Writes to the head's place in a cache or, with `at_once`, in q_out.
  template <class To>
  __device__ __forceinline__ void store(To* head, bool at_once, const float (&a)[kElems],
                                        const float (&b)[kElems]) const {
    store_neighbors(head + first, a, at_once);
    if (has_second) store_neighbors(head + second, b, at_once);
  }
};

// Writes a unit of a token's head where it belongs.
template <class T, class Cache, int kElems, class... MaybePages>
__device__ __forceinline__ void store_unit(const RopeAppendParams& p, const Unit<kElems>& unit,
                                           const CachePlace& place, int64_t slot, int token, int head,
                                           const float (&a)[kElems], const float (&b)[kElems],
                                           const MaybePages&... pages) {
  if (head < p.num_heads) {
    T* out = static_cast<T*>(p.q_out) + (int64_t(token) * p.num_heads + head) * p.head_dim;
    return unit.store(out, true, a, b);
  }
  const bool is_value = head >= p.num_heads + p.num_kv_heads;
  const int kv_head = head - p.num_heads - (is_value ? p.num_kv_heads : 0);
  const int64_t kv_place = head_place(p, place.capacity, slot, token / p.query_len, kv_head, pages...);
  if constexpr (sizeof...(MaybePages) > 0) {
    if (kv_place == kNowhere) return;
  }
  char* const cache = is_value ? place.v_cache : place.k_cache;
  const bool at_once = kElems == 1 || reinterpret_cast<uintptr_t>(cache) % 16 == 0;
  unit.store(reinterpret_cast<Cache*>(cache) + kv_place * p.head_dim, at_once, a, b);
}

// MaybePages: Pages, or nothing. The kernel in front may still run.
template <class T, class Cache, int kElems, class... MaybePages>
__global__ void __launch_bounds__(kThreads) rope_append_kernel(RopeAppendParams p, MaybePages... pages) {
  const int units = (p.head_dim + 1) / 2 / kElems;  // of a head; an odd head_dim leaves one element alone
  const int heads = p.num_heads + 2 * p.num_kv_heads;
  const int index = blockIdx.y * kThreads + threadIdx.x;
  if (index >= heads * units) return;
  allow_next_kernel();
  const int head = index / units, token = blockIdx.x;
  const bool is_value = head >= p.num_heads + p.num_kv_heads;
  const Unit<kElems> unit(p, index % units, is_value ? 0 : p.rotary_dim);
  const CachePlace place = cache_place(p, pages...);
  const int64_t slot = cache_slot(p, place.capacity, token), column = int64_t(head) * p.head_dim;
  wait_for_previous_kernel();  // the projections
  drop_l1();
  const T* bias = p.bias ? static_cast<const T*>(p.bias) + column : nullptr;
  float a[kElems], b[kElems] = {};
  unit.load(HeadInput<T>(p, token, head).x, bias, a, b);
  Angles<T, kElems> angles;
  unit.load_angles(p, token, angles);
  unit.turn(p, angles, a, b);
  store_unit<T, Cache>(p, unit, place, slot, token, head, a, b, pages...);
}

// The same with norms. Threads of one threadIdx.y take what one norm is of: a head of a token, or all its
// queries or keys. blockIdx.x counts tokens; blockIdx.y and threadIdx.y heads, or queries, keys and values.
template <class T, class Cache, int kElems, class... MaybePages>
__global__ void __launch_bounds__(kMaxNormedThreads)
    rope_append_normed_kernel(RopeAppendParams p, MaybePages... pages) {
  __shared__ float scratch[kMaxNormedThreads / kWarpSize];
  const int part = blockIdx.y * blockDim.y + threadIdx.y, token = blockIdx.x, threads = blockDim.x;
  if (!p.norms_all_heads && part >= p.num_heads + 2 * p.num_kv_heads) return;
  const int of_part = part == 0 ? p.num_heads : p.num_kv_heads;
  const int begin = p.norms_all_heads ? (part == 0 ? 0 : p.num_heads + (part - 1) * p.num_kv_heads) : part;
  const int count = p.norms_all_heads ? of_part : 1;
  const bool is_value = begin >= p.num_heads + p.num_kv_heads;
  const T* weight = is_value ? nullptr : static_cast<const T*>(begin < p.num_heads ? p.q_norm : p.k_norm);
  const int rotary_dim = is_value ? 0 : p.rotary_dim;
  const int units = (p.head_dim + 1) / 2 / kElems, total = count * units;

  allow_next_kernel();
  const CachePlace place = cache_place(p, pages...);
  const int64_t slot = cache_slot(p, place.capacity, token), column = int64_t(begin) * p.head_dim;
  using C = Chunk<T, kElems>;
  typename C::Raw factors[2];  // of this thread's first unit, out of memory meanwhile
  const auto load_factors = [&](int index) {
    const int head = index / units;
    const Unit<kElems> unit(p, index - head * units, rotary_dim);
    const T* const of_head = p.norms_all_heads ? weight + head * p.head_dim : weight;
    factors[0] = C::load(of_head + unit.first);
    factors[1] = unit.has_second ? C::load(of_head + unit.second) : C::zero();
  };
  const bool has_unit = threadIdx.x < total;
  if (p.norms_early && weight && has_unit) load_factors(threadIdx.x);
  wait_for_previous_kernel();  // the projections
  const HeadInput<T> from(p, token, begin);
  const T* const bias = p.bias ? static_cast<const T*>(p.bias) + column : nullptr;
  const auto load = [&](int index, float (&a)[kElems], float (&b)[kElems]) {
    const int head = index / units;
    const Unit<kElems> unit(p, index - head * units, rotary_dim);
    unit.template load<true>(from.x + head * from.stride, bias ? bias + head * p.head_dim : nullptr, a, b);
  };
  const auto load_angles = [&](int index, Angles<T, kElems>& angles) {
    Unit<kElems>(p, index % units, rotary_dim).template load_angles<true>(p, token, angles);
  };
  float a[kElems] = {}, b[kElems] = {};  // of this thread's first unit
  Angles<T, kElems> angles;              // of it, which come while its squares are added up
  if (has_unit) load(threadIdx.x, a, b), load_angles(threadIdx.x, angles);
  float scale = 1.f;
  if (weight) {
    float squares = sum_of_squares(a, b);
    for (int index = threadIdx.x + threads; index < total; index += threads) {
      float more_a[kElems], more_b[kElems] = {};
      load(index, more_a, more_b);
      squares += sum_of_squares(more_a, more_b);
    }
    scale = inverse_root<T>(block_sum(squares, scratch) / float(count * p.head_dim) + p.norm_eps);
  }
  for (int index = threadIdx.x; index < total; index += threads) {
    if (index >= threads) load(index, a, b), load_angles(index, angles);
    const int head = index / units;
    const Unit<kElems> unit(p, index - head * units, rotary_dim);
    if (weight) {
      if (!p.norms_early || index >= threads) load_factors(index);
      float factor_a[kElems], factor_b[kElems];
      C::unpack(factors[0], factor_a), C::unpack(factors[1], factor_b);
#pragma unroll
      for (int e = 0; e < kElems; ++e) {
        a[e] *= scale * (p.norm_offset + factor_a[e]);
        b[e] *= scale * (p.norm_offset + factor_b[e]);
      }
    }
    unit.turn(p, angles, a, b);
    store_unit<T, Cache>(p, unit, place, slot, token, begin + head, a, b, pages...);
  }
}

// Whether every run of kElems elements starts a 16-byte access where the caches do; the kernel looks at
// these, whose addresses may be in a kv_table.
template <int kElems>
bool is_aligned(const RopeAppendParams& p) {
  for (const HeadRows* rows : {&p.q, &p.k, &p.v}) {
    if (!is_aligned16(rows->first) || rows->token_stride % kElems || rows->head_stride % kElems) return false;
  }
  for (const void* start : {p.bias, p.cos, p.sin, static_cast<const void*>(p.q_out), p.q_norm, p.k_norm}) {
    if (!is_aligned16(start)) return false;
  }
  return p.head_dim % (2 * kElems) == 0 && p.rotary_dim % (2 * kElems) == 0;
}

template <class T, class Cache, int kElems, class... MaybePages>
void launch(const RopeAppendParams& params, bool programmatic_launch, cudaStream_t stream,
            const MaybePages&... pages) {
  const int units = (params.head_dim + 1) / 2 / kElems, heads = params.num_heads + 2 * params.num_kv_heads;
  const int tokens = params.batch * params.query_len;
  const size_t smem_bytes = 0;
  const auto start = [&](auto kernel, dim3 grid, dim3 block) {
    HF_FASTPATH_CUDA_CHECK(
        launch_programmatic(kernel, grid, block, smem_bytes, stream, programmatic_launch, params, pages...));
  };
  if (params.q_norm) {
    const int of_a_norm = units * (params.norms_all_heads ? params.num_heads : 1);
    const int threads = std::min((of_a_norm + kWarpSize - 1) / kWarpSize * kWarpSize, kMaxNormedThreads);
    const int parts = params.norms_all_heads ? 3 : heads;
    const dim3 block(threads, threads == kWarpSize && !params.norms_all_heads ? kHeadsOfBlock : 1);
    const dim3 grid(tokens, (parts + block.y - 1) / block.y);
    return start(rope_append_normed_kernel<T, Cache, kElems, MaybePages...>, grid, block);
  }
  const dim3 grid(tokens, (heads * units + kThreads - 1) / kThreads);
  start(rope_append_kernel<T, Cache, kElems, MaybePages...>, grid, kThreads);
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
  if (params.batch * params.query_len == 0 || params.head_dim == 0) return;
  if (params.num_heads + params.num_kv_heads == 0) return;
  if (is_quantized(params.kv_type)) return launch_rope_append_quants(params, stream);
  if (fits_rope_append_heads(params)) return launch_rope_append_heads(params, programmatic_launch, stream);
  launch_typed(params, programmatic_launch, stream);
}

void launch_rope_append_paged(const RopeAppendParams& params, const Pages& pages, bool programmatic_launch,
                              cudaStream_t stream) {
  launch_typed(params, programmatic_launch, stream, pages);
}

}  // namespace hf_fastpath
