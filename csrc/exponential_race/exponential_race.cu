// What: temperature, top-k, top-p and min-p over every row of logits, and the race of the tokens they keep:
//   exp(score - max score) / noise, 0 for the others. The argmax is the sampled token.
// Work split: one block a row. A thread takes every 1024th chunk of 16 bytes (of one element where rows are
//   not aligned). Top-k and top-p are radix selects over integers that order as the logits do: for 8 bits at
//   a time a histogram, of counts for top-k and of probability mass for top-p, tells which bin the threshold
//   lies in. Few tokens left by top-k: each thread keeps one in registers, and the rest does not see the row.
//   All sums that a decision hangs on are of integers: the same tokens every time.
// Traffic: rows * vocab_size * (sizeof(T) + 4 + 4) once; logits again out of L1 or L2, 2 + 2 * sizeof(T)
//   times at most. No noise is read for tokens that top-k removed.
// Roofline: latency: one SM a row, a few barriers for each 8 bits.

#include <cassert>

#include "common/async.cuh"
#include "common/numeric.cuh"
#include "common/warp.cuh"
#include "exponential_race/exponential_race_cuda.h"

namespace hf_fastpath {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kUnroll = 4;     // loads in flight a thread
constexpr int kDigitBits = 8;  // more would take more shared memory than one pass less saves
constexpr int kBins = 1 << kDigitBits;
constexpr int kBinsPerLane = kBins / kWarpSize;

struct Shared {
  uint32_t histogram[kBins][kWarpSize];  // a column a lane: logits share few exponents, lanes would collide
  alignas(16) uint32_t bins[kBins];
  uint2 kept[kThreads];  // key, index
  uint32_t num_kept;
  float sums[kWarps];
  uint32_t maxima[kWarps];
};

// ---- integers that order as the logits do: zeros of both signs are equal, NaN is the largest

template <class T>
constexpr uint32_t kSignBit = 1u << (8 * sizeof(T) - 1);
template <class T>
constexpr uint32_t kInfinity = 0x7f80u;  // bfloat16
template <>
constexpr uint32_t kInfinity<__half> = 0x7c00u;
template <>
constexpr uint32_t kInfinity<float> = 0x7f800000u;
template <class T>
constexpr uint32_t kAllBits = kSignBit<T> | (kSignBit<T> - 1);

template <class T>
__device__ __forceinline__ uint32_t key_of(uint32_t bits) {
  const uint32_t magnitude = bits & ~kSignBit<T>;
  if (magnitude > kInfinity<T>) return kAllBits<T>;
  if (magnitude == 0) return kSignBit<T>;
  return bits & kSignBit<T> ? bits ^ kAllBits<T> : bits | kSignBit<T>;
}

template <class T>
__device__ __forceinline__ float value_of(uint32_t key) {
  const uint32_t bits = key & kSignBit<T> ? key ^ kSignBit<T> : key ^ kAllBits<T>;
  if constexpr (sizeof(T) == 4) {
    return __uint_as_float(bits);
  } else {
    return unpack2(bits, T()).x;
  }
}

template <class T>
__device__ __forceinline__ void keys_of(const uint4& raw, uint32_t (&keys)[kVecElems<T>]) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int e = 0; e < kVecElems<T>; ++e) {
    if constexpr (sizeof(T) == 4) {
      keys[e] = key_of<T>(words[e]);
    } else {
      keys[e] = key_of<T>(words[e / 2] >> 16 * (e % 2) & 0xffffu);
    }
  }
}
template <class T>
__device__ __forceinline__ void keys_of(const T& raw, uint32_t (&keys)[1]) {
  if constexpr (sizeof(T) == 4) {
    keys[0] = key_of<T>(__float_as_uint(raw));
  } else {
    keys[0] = key_of<T>(*reinterpret_cast<const uint16_t*>(&raw));
  }
}

// ---- the tokens still in the race

template <class T, int kElems>
struct Tokens {
  const T* logits;
  int vocab_size;
  bool few = false;  // in registers, one a thread, in any order; else the row
  int num_few = 0, index = 0;
  uint32_t key = 0;

  // Calls f(keys, index of the first): with kElems keys at once or with one.
  template <class F>
  __device__ __forceinline__ void visit(const F& f) const {
    uint32_t one[1] = {key};
    if (few) {
      if (threadIdx.x < num_few) f(one, index);
      return;
    }
    using C = Chunk<T, kElems>;
    const int chunks = vocab_size / kElems;
    for (int base = threadIdx.x; base < chunks; base += kThreads * kUnroll) {
      typename C::Raw raw[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int chunk = base + u * kThreads;
        raw[u] = C::load(logits + int64_t(chunk < chunks ? chunk : base) * kElems);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int chunk = base + u * kThreads;
        uint32_t keys[kElems];
        keys_of<T>(raw[u], keys);
        if (chunk < chunks) f(keys, chunk * kElems);
      }
    }
    for (int i = chunks * kElems + threadIdx.x; i < vocab_size; i += kThreads) {
      keys_of<T>(logits[i], one);
      f(one, i);
    }
  }
};

// ---- radix select

struct Selected {
  uint32_t digits;  // the least for which the weights of all tokens up to it sum to more than the target
  uint32_t rest;    // the target without the weights of tokens below
};

// Over the `bits` lowest bits (a multiple of 8) of digits_of(key, index), with the weights
// weight_of(key, index); target_of(sum of all weights) has to be less than that sum. Called by all threads,
// returns the same to all; the histogram is zero before and after.
template <class Tokens, class DigitsOf, class WeightOf, class TargetOf>
__device__ __forceinline__ Selected radix_select(Shared& s, const Tokens& tokens, int bits,
                                                 const DigitsOf& digits_of, const WeightOf& weight_of,
                                                 const TargetOf& target_of) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  Selected at{0, 0};
  for (int shift = bits - kDigitBits; shift >= 0; shift -= kDigitBits) {
    tokens.visit([&](const auto& keys, int first) {
      constexpr int kCount = sizeof(keys) / sizeof(keys[0]);
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        const uint32_t digits = digits_of(keys[e], first + e) >> shift;
        if (digits >> kDigitBits != at.digits) continue;
        const uint32_t weight = weight_of(keys[e], first + e);
        if (weight != 0) atomicAdd(&s.histogram[digits % kBins][lane], weight);
      }
    });
    __syncthreads();  // the histogram is complete, and nobody reads the bins of the digit before
#pragma unroll
    for (int bin = warp; bin < kBins; bin += kWarps) {
      const uint32_t sum = __reduce_add_sync(kAllLanes, s.histogram[bin][lane]);
      s.histogram[bin][lane] = 0;
      if (lane == 0) s.bins[bin] = sum;
    }
    __syncthreads();  // the bins are complete and the histogram is zero
    uint32_t own[kBinsPerLane], sum = 0;
#pragma unroll
    for (int i = 0; i < kBinsPerLane; ++i) {
      own[i] = s.bins[lane * kBinsPerLane + i];
      sum += own[i];
    }
    uint32_t up_to = sum;  // of this lane's bins and all lower ones
#pragma unroll
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const uint32_t lower = __shfl_up_sync(kAllLanes, up_to, offset);
      if (lane >= offset) up_to += lower;
    }
    if (shift + kDigitBits == bits) {
      at.rest = target_of(__shfl_sync(kAllLanes, up_to, kWarpSize - 1));
    }
    const int owner = __ffs(__ballot_sync(kAllLanes, up_to > at.rest)) - 1;
    uint32_t below = up_to - sum, bin = lane * kBinsPerLane;
    bool found = false;
#pragma unroll
    for (int i = 0; i < kBinsPerLane - 1; ++i) {
      found = found || below + own[i] > at.rest;
      if (!found) below += own[i], ++bin;
    }
    at.rest -= __shfl_sync(kAllLanes, below, owner);
    at.digits = at.digits << kDigitBits | __shfl_sync(kAllLanes, bin, owner);
  }
  return at;
}

template <class T, int kElems>
__global__ void __launch_bounds__(kThreads, 1)
    exponential_race_kernel(const __grid_constant__ ExponentialRaceParams p) {
  __shared__ Shared s;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  allow_next_kernel();
  for (int i = threadIdx.x; i < kBins * kWarpSize; i += kThreads) (&s.histogram[0][0])[i] = 0;
  if (threadIdx.x == 0) s.num_kept = 0;
  wait_for_previous_kernel();
  drop_l1();

  const int vocab_size = static_cast<int>(p.vocab_size);
  const float to_scores = 1.0f / static_cast<float>(p.settings[0]);
  const int64_t top_k = static_cast<int64_t>(p.settings[1]);
  const double top_p = p.settings[2];
  const float min_p = fminf(static_cast<float>(p.settings[3]), 1.0f);
  const float* noise = p.noise + blockIdx.x * p.vocab_size;
  float* out = p.out + blockIdx.x * p.vocab_size;
  Tokens<T, kElems> tokens{static_cast<const T*>(p.logits) + blockIdx.x * p.stride, vocab_size};

  uint32_t max_key = 0;
  tokens.visit([&](const auto& keys, int) {
    for (const uint32_t key : keys) max_key = max(max_key, key);
  });
  max_key = __reduce_max_sync(kAllLanes, max_key);
  if (lane == 0) s.maxima[warp] = max_key;
  __syncthreads();  // every warp's maximum; the histogram is zero
  max_key = __reduce_max_sync(kAllLanes, s.maxima[lane]);
  const bool is_defined =
      max_key < (kInfinity<T> | kSignBit<T>) && max_key > (kInfinity<T> ^ kAllBits<T> ^ kSignBit<T>);
  assert(is_defined && "hf_fastpath::exponential_race: a row of logits holds inf or nan, or only -inf");
  const float largest = value_of<T>(max_key);
  const auto weight_of = [&](uint32_t key) { return expf((value_of<T>(key) - largest) * to_scores); };
  const auto key_itself = [](uint32_t key, int) { return key; };

  uint32_t least_key = 0;
  if (top_k > 0 && top_k < vocab_size) {
    const Selected kth = radix_select(
        s, tokens, 8 * sizeof(T), key_itself, [](uint32_t, int) { return 1u; },
        [&](uint32_t count) { return count - static_cast<uint32_t>(top_k); });
    least_key = kth.digits;
    if (top_k + kth.rest <= kThreads) {  // rest: equals of the kth that come before it
      tokens.visit([&](const auto& keys, int first) {
        constexpr int kCount = sizeof(keys) / sizeof(keys[0]);
#pragma unroll
        for (int e = 0; e < kCount; ++e) {
          if (keys[e] >= least_key) s.kept[atomicAdd(&s.num_kept, 1)] = make_uint2(keys[e], first + e);
        }
      });
      constexpr int kWide = kElems == 1 ? 1 : kVecElems<float>;
      const float zeros[kWide] = {};
      for (int i = threadIdx.x; i < vocab_size / kWide; i += kThreads) {
        Chunk<float, kWide>::store(out + int64_t(i) * kWide, zeros);
      }
      for (int i = vocab_size / kWide * kWide + threadIdx.x; i < vocab_size; i += kThreads) out[i] = 0;
      __syncthreads();  // every kept token is listed, and every zero written before the results
      tokens.few = true;
      tokens.num_few = static_cast<int>(s.num_kept);
      if (threadIdx.x < tokens.num_few) {
        tokens.key = s.kept[threadIdx.x].x;
        tokens.index = static_cast<int>(s.kept[threadIdx.x].y);
      }
    }
  }

  int least_index = 0;  // of those with least_key
  if (top_p < 1) {
    // Mass in units that make the sum about 2^31. Where tokens are few, their number bounds the sum and costs
    // nothing.
    float sum = static_cast<float>(tokens.num_few);
    if (!tokens.few) {
      tokens.visit([&](const auto& keys, int) {
        for (const uint32_t key : keys) sum += key < least_key ? 0.f : weight_of(key);
      });
      sum = block_sum(sum, s.sums);
    }
    const float units = 0x1p31f / sum;
    const auto mass_of = [&](uint32_t key, int) {
      return key < least_key ? 0u : __float2uint_rn(weight_of(key) * units);
    };
    const Selected first = radix_select(s, tokens, 8 * sizeof(T), key_itself, mass_of, [&](uint32_t total) {
      return min(total - 1, static_cast<uint32_t>((1 - top_p) * total));
    });
    const uint32_t equals_removed = first.rest / mass_of(first.digits, 0);
    least_key = first.digits;
    if (equals_removed > 0) {
      int bits = kDigitBits;
      while (vocab_size - 1 >> bits != 0) bits += kDigitBits;
      least_index = radix_select(
                        s, tokens, bits, [](uint32_t, int index) { return static_cast<uint32_t>(index); },
                        [&](uint32_t key, int) { return key == least_key ? 1u : 0u; },
                        [&](uint32_t) { return equals_removed; })
                        .digits;
    }
  }

  tokens.visit([&](const auto& keys, int first) {
    constexpr int kCount = sizeof(keys) / sizeof(keys[0]);
    constexpr int kWide = kCount == 1 ? 1 : kVecElems<float>;
#pragma unroll
    for (int e = 0; e < kCount; e += kWide) {
      float values[kWide];
      Chunk<float, kWide>::unpack(Chunk<float, kWide>::load(noise + first + e), values);
#pragma unroll
      for (int i = 0; i < kWide; ++i) {
        const uint32_t key = keys[e + i];
        const float weight = weight_of(key);
        const bool keep = (key > least_key || (key == least_key && first + e + i >= least_index)) &&
                          weight >= min_p && weight > 0.f;  // 0 / 0 would win
        values[i] = keep ? weight / values[i] : 0.f;
      }
      Chunk<float, kWide>::store(out + first + e, values);
    }
  });
  trace(TracePoint::kEnd);
}

}  // namespace

void launch_exponential_race(const ExponentialRaceParams& params, cudaStream_t stream) {
  if (params.rows == 0) return;
  with_type(params.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kElems = kVecElems<T>;
    const bool aligned =
        is_aligned16(params.logits) && is_aligned16(params.noise) && is_aligned16(params.out) &&
        (params.rows == 1 || (params.stride % kElems == 0 && params.vocab_size % kVecElems<float> == 0));
    const auto kernel = aligned ? exponential_race_kernel<T, kElems> : exponential_race_kernel<T, 1>;
    const dim3 grid(static_cast<unsigned>(params.rows)), block(kThreads);
    HF_FASTPATH_CUDA_CHECK(
        launch_programmatic(kernel, grid, block, 0, stream, params.programmatic_launch, params));
  });
}

}  // namespace hf_fastpath
