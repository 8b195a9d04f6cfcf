// What: rope_append of a few tokens' 16-bit heads into a cache of the same type, with a norm of each head or
//   none.
// Work split: a warp a head of a token, two runs of 2 or 4 elements a lane. grid.x counts the tokens of all
//   rows, grid.y blocks of heads.
// Traffic: that of rope_append.cu. In a step every layer fetches its kernels' code from L2 again: this is
// less
//   than half of that kernel's, and what is known before the projections is computed in front of the wait.
// Roofline: latency of one load behind the kernel in front.

#include "common/async.cuh"
#include "common/cuda_check.cuh"
#include "common/inverse_root.cuh"
#include "common/numeric.cuh"
#include "common/warp.cuh"
#include "rope_append/rope_append.cuh"

namespace hf_fastpath {
namespace {

constexpr int kWarps = 4;        // small blocks: heads should reach many SMs
constexpr int kMostTokens = 64;  // of a step; prompts gain more from 16 bytes a load

// Elements of a head that a warp holds.
template <int kElems>
constexpr int kMostDims = 2 * kElems * kWarpSize;

// kElems: of a run, 2 or 4. Runs that turn, turn with each other.
template <class T, int kElems>
struct LaneRuns {
  static constexpr int kWords = kElems / 2;
  struct Raw {
    uint32_t words[2][kWords];
  };
  int first[2];
  bool turns, present;

  // rotary_dim: 0 of a value.
  __device__ __forceinline__ LaneRuns(int lane, int head_dim, int rotary_dim) {
    const int half = rotary_dim / 2, from = lane * kElems;
    turns = from < half;
    present = 2 * from < head_dim;
    first[0] = turns ? from : 2 * from;  // what does not turn starts at element 2 * half
    first[1] = first[0] + (turns ? half : kElems);
  }

  // Reads L2: kernels that still ran when this one started may have written it.
  __device__ __forceinline__ Raw load(const T* head) const {
    Raw raw = {};
    if (!present) return raw;
#pragma unroll
    for (int run = 0; run < 2; ++run) {
      if constexpr (kWords == 1) {
        raw.words[run][0] = __ldcg(reinterpret_cast<const unsigned*>(head + first[run]));
      } else {
        const uint2 pair = __ldcg(reinterpret_cast<const uint2*>(head + first[run]));
        raw.words[run][0] = pair.x, raw.words[run][1] = pair.y;
      }
    }
    return raw;
  }
  // at_once: `head` is aligned to a run.
  __device__ __forceinline__ void store(T* head, bool at_once, const float (&values)[2][kElems]) const {
    if (!present) return;
#pragma unroll
    for (int run = 0; run < 2; ++run) {
      if (!at_once) {
#pragma unroll
        for (int e = 0; e < kElems; ++e) head[first[run] + e] = from_float<T>(values[run][e]);
      } else if constexpr (kWords == 1) {
        *reinterpret_cast<uint32_t*>(head + first[run]) = pack2(values[run][0], values[run][1], T());
      } else {
        *reinterpret_cast<uint2*>(head + first[run]) = make_uint2(pack2(values[run][0], values[run][1], T()),
                                                                  pack2(values[run][2], values[run][3], T()));
      }
    }
  }
  __device__ __forceinline__ static void unpack(const Raw& raw, float (&values)[2][kElems]) {
#pragma unroll
    for (int run = 0; run < 2; ++run)
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const float2 pair = unpack2(raw.words[run][w], T());
        values[run][2 * w] = pair.x, values[run][2 * w + 1] = pair.y;
      }
  }
};

template <class T, int kElems>
__global__ void __launch_bounds__(kWarps* kWarpSize) rope_append_heads_kernel(RopeAppendParams p) {
  using Runs = LaneRuns<T, kElems>;
  using Raw = typename Runs::Raw;
  const int lane = threadIdx.x % kWarpSize, head = blockIdx.y * kWarps + threadIdx.x / kWarpSize;
  const int token = blockIdx.x;
  if (head >= p.num_heads + 2 * p.num_kv_heads) return;
  allow_next_kernel();
  const bool is_value = head >= p.num_heads + p.num_kv_heads;
  const Runs runs(lane, p.head_dim, is_value ? 0 : p.rotary_dim);
  // This is all that does not depend on the projections.
  const T* const weight =
      is_value ? nullptr : static_cast<const T*>(head < p.num_heads ? p.q_norm : p.k_norm);
  Raw factors = {}, bias = {};
  if (p.norms_early && weight) factors = runs.load(weight);
  if (p.norms_early && p.bias) bias = runs.load(static_cast<const T*>(p.bias) + head * p.head_dim);
  const CachePlace place = cache_place(p);
  const int64_t slot = cache_slot(p, place.capacity, token);
  T* const to = static_cast<T*>(feature_place<T>(p, place, slot, token, head, 0).element);
  const bool at_once =
      reinterpret_cast<uintptr_t>(to) % (kElems * sizeof(T)) == 0;  // a table may say anything
  const T* const from = HeadInput<T>(p, token, head).x;
  const T* const cos_at = token_angles<T>(p, p.cos, token);
  const T* const sin_at = token_angles<T>(p, p.sin, token);
  const float of_mean = 1.f / float(p.head_dim);
  wait_for_previous_kernel();  // the projections
  const Raw raw = runs.load(from);
  Raw cosines = {}, sines = {};
  if (runs.turns) cosines = runs.load(cos_at), sines = runs.load(sin_at);
  if (!p.norms_early && weight) factors = runs.load(weight);
  if (!p.norms_early && p.bias) bias = runs.load(static_cast<const T*>(p.bias) + head * p.head_dim);
  float x[2][kElems];
  Runs::unpack(raw, x);
  if (p.bias) {
    float more[2][kElems];
    Runs::unpack(bias, more);
#pragma unroll
    for (int e = 0; e < kElems; ++e) x[0][e] += more[0][e], x[1][e] += more[1][e];
  }
  if (weight) {
    float squares = 0.f, w[2][kElems];
#pragma unroll
    for (int e = 0; e < kElems; ++e) squares = fmaf(x[0][e], x[0][e], fmaf(x[1][e], x[1][e], squares));
    const float scale = inverse_root<T>(fmaf(warp_sum(squares), of_mean, p.norm_eps));
    Runs::unpack(factors, w);
#pragma unroll
    for (int e = 0; e < kElems; ++e) {
      x[0][e] *= scale * (p.norm_offset + w[0][e]);
      x[1][e] *= scale * (p.norm_offset + w[1][e]);
    }
  }
  if (runs.turns) {
    float c[2][kElems], s[2][kElems];
    Runs::unpack(cosines, c), Runs::unpack(sines, s);
#pragma unroll
    for (int e = 0; e < kElems; ++e) turn_pair({c[0][e], c[1][e]}, {s[0][e], s[1][e]}, x[0][e], x[1][e]);
  }
  runs.store(to, at_once, x);
}

template <class T, int kElems>
void launch(const RopeAppendParams& p, bool programmatic_launch, cudaStream_t stream) {
  const int heads = p.num_heads + 2 * p.num_kv_heads;
  const dim3 grid(p.batch * p.query_len, (heads + kWarps - 1) / kWarps), block(kWarps * kWarpSize);
  const size_t smem_bytes = 0;
  HF_FASTPATH_CUDA_CHECK(launch_programmatic(rope_append_heads_kernel<T, kElems>, grid, block, smem_bytes,
                                             stream, programmatic_launch, p));
}

}  // namespace

bool fits_rope_append_heads(const RopeAppendParams& p) {
  if (p.batch * p.query_len > kMostTokens) return false;
  if (p.dtype == DType::kFloat32 || p.kv_type != kv_type(p.dtype) || p.norms_all_heads || p.neighbors)
    return false;
  if (p.head_dim % 8 || p.rotary_dim % 8 || p.head_dim > kMostDims<4>) return false;
  for (const HeadRows* rows : {&p.q, &p.k, &p.v}) {
    if (!is_aligned16(rows->first) || rows->token_stride % 8 || rows->head_stride % 8) return false;
  }
  for (const void* start : {p.bias, p.cos, p.sin, static_cast<const void*>(p.q_out), p.q_norm, p.k_norm}) {
    if (!is_aligned16(start)) return false;
  }
  return p.kv_table || (is_aligned16(p.k_cache) && is_aligned16(p.v_cache));
}

void launch_rope_append_heads(const RopeAppendParams& p, bool programmatic_launch, cudaStream_t stream) {
  with_type(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (sizeof(T) == 2) {
      if (p.head_dim <= kMostDims<2>) return launch<T, 2>(p, programmatic_launch, stream);
      launch<T, 4>(p, programmatic_launch, stream);
    }
  });
}

}  // namespace hf_fastpath
