// Attention of one head over one new token by the blocks of a cluster: each takes an 8th of the old
// positions, all make the head's output.
#pragma once

#include "common/async.cuh"
#include "common/lengths.h"
#include "common/numeric.cuh"
#include "common/warp.cuh"
#include "decode_layers/cluster_layers.h"
#include "decode_layers/cluster_product.cuh"
#include "rope_append/rope_append.cuh"

namespace hf_fastpath {

// Outputs, maximum score and sum over a part of the positions: from every block, then of this block's warps.
struct HeadPartials {
  float outputs[kClusterSize][kClusterHeadDim];
  float maxima[kClusterSize], sums[kClusterSize];
  float warp_outputs[kClusterWarps][kClusterHeadDim];
  float warp_maxima[kClusterWarps], warp_sums[kClusterWarps];
  float new_score;

  static constexpr int kBytesIn = kClusterSize * (kClusterHeadDim + 2) * int(sizeof(float));
};

template <class T, bool kPresent>
struct HeadAttention {
  __device__ __forceinline__ HeadAttention(const ClusterBlockParams&, int, int) {}
};

#if HF_FASTPATH_HOPPER

template <class T>
struct HeadAttention<T, true> {
  static constexpr int kElems = kVecElems<T>;
  static constexpr int kLanes = kClusterHeadDim / kElems;   // of a position, 16 bytes each
  static constexpr int kAtOnce = kClusterThreads / kLanes;  // positions
  static constexpr int kAhead = 2;                          // times as many are under way
  using C = Chunk<T, kElems>;

  T *k_head, *v_head;
  uint32_t capacity;
  int position, rank;
  int begin, end;  // of this block's old positions
  bool sees_new;
  uint4 k_raw[kAhead], v_raw[kAhead];

  // Asks for the first old positions: they do not depend on the kernel in front.
  __device__ __forceinline__ HeadAttention(const ClusterBlockParams& p, int head, int rank) : rank(rank) {
    const char *k = static_cast<const char*>(p.k_cache), *v = static_cast<const char*>(p.v_cache);
    int64_t slots = p.capacity;
    if (p.kv_table) {
      const long long* entry = reinterpret_cast<const long long*>(p.kv_table) + 3 * p.layer;
      k = reinterpret_cast<const char*>(__ldg(entry)), v = reinterpret_cast<const char*>(__ldg(entry + 1));
      slots = __ldg(entry + 2);
    }
    capacity = static_cast<uint32_t>(slots);
    const int64_t head_bytes = int64_t(head) * slots * kClusterHeadDim * int(sizeof(T));
    k_head = reinterpret_cast<T*>(const_cast<char*>(k) + head_bytes);
    v_head = reinterpret_cast<T*>(const_cast<char*>(v) + head_bytes);
    position = bounded_length(__ldcg(p.seq_lens)) - 1;
    int first = p.starts ? max(__ldcg(p.starts), 0) : 0;
    if (p.window > 0) first = max(first, position - p.window + 1);
    sees_new = first <= position;
    first = bounded_length(max(first, position + 1 - static_cast<int>(capacity)), position + 1);
    const int each = (max(position - first, 0) + kClusterSize - 1) / kClusterSize;
    begin = first + rank * each, end = min(begin + each, position);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load(begin + group() + i * kAtOnce, k_raw[i], v_raw[i]);
  }

  // Brings the head's output, [kClusterHeadDim] in shared memory behind the next barrier, to `out` of every
  // block of the cluster, from query, key and value of the new token one after the other in `qkv`; appends
  // the key and the value. All threads of the block come here.
  __device__ __forceinline__ void mix(const ClusterBlockParams& p, const float* qkv, HeadPartials& partials,
                                      const Inbox& inbox, float* out) {
    const float scale = p.scale * 1.4426950408889634f;  // of powers of 2
    if (threadIdx.x >= kClusterThreads) {
      take_new(qkv, scale, partials);
    } else {
      take_old(qkv, scale, partials);
    }
    __syncthreads();  // every warp's positions
    exchange(partials, inbox);
    inbox.wait();
    const int d = threadIdx.x;
    if (d >= kClusterHeadDim) return;
    const float* new_v = qkv + 2 * kClusterHeadDim;
    float largest = partials.new_score;
#pragma unroll
    for (int r = 0; r < kClusterSize; ++r) largest = fmaxf(largest, partials.maxima[r]);
    const float new_weight = power(partials.new_score, largest);
    float sum = new_weight, mixed = new_weight * new_v[d];
#pragma unroll
    for (int r = 0; r < kClusterSize; ++r) {
      const float weight = power(partials.maxima[r], largest);
      sum = fmaf(partials.sums[r], weight, sum);
      mixed = fmaf(partials.outputs[r][d], weight, mixed);
    }
    out[d] = sees_new ? mixed / sum : 0.f;
  }

 private:
  __device__ __forceinline__ static int lane() { return threadIdx.x % kLanes; }
  __device__ __forceinline__ static int group() { return threadIdx.x / kLanes; }
  // 2^(x - largest), where the largest may be -inf: nothing seen yet.
  __device__ __forceinline__ static float power(float x, float largest) {
    return exp2f(x - (largest == -INFINITY ? 0.f : largest));
  }

  __device__ __forceinline__ void load(int at, uint4& k, uint4& v) const {
    const bool there = threadIdx.x < kClusterThreads && at < end;
    const int64_t offset = int64_t(there ? uint32_t(at) % capacity : 0) * kClusterHeadDim + lane() * kElems;
    k = there ? C::load_streaming_l2(k_head + offset) : C::zero();
    v = there ? C::load_streaming_l2(v_head + offset) : C::zero();
  }

  // One warp takes the new position.
  __device__ __forceinline__ void take_new(const float* qkv, float scale, HeadPartials& partials) const {
    const float *new_k = qkv + kClusterHeadDim, *new_v = new_k + kClusterHeadDim;
    const int lane = threadIdx.x % kWarpSize;
    float score = 0.f;
#pragma unroll
    for (int d = lane; d < kClusterHeadDim; d += kWarpSize) {
      score = fmaf(qkv[d], new_k[d], score);
      if (rank > 0) continue;
      const int64_t at = slot_of(position, capacity) * kClusterHeadDim + d;
      k_head[at] = from_float<T>(new_k[d]);
      v_head[at] = from_float<T>(new_v[d]);
    }
    score = warp_sum(score);
    if (lane == 0) partials.new_score = sees_new ? score * scale : -INFINITY;
  }

  // The other warps take the old positions.
  __device__ __forceinline__ void take_old(const float* qkv, float scale, HeadPartials& partials) {
    float q[kElems], out[kElems] = {}, largest = -INFINITY, sum = 0.f;
#pragma unroll
    for (int e = 0; e < kElems; ++e) q[e] = qkv[lane() * kElems + e] * scale;
#pragma unroll 1
    for (int base = begin; base < end; base += kAhead * kAtOnce) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int at = base + i * kAtOnce + group();
        float k[kElems], v[kElems], score = 0.f;
        C::unpack(k_raw[i], k);
        C::unpack(v_raw[i], v);
        load(at + kAhead * kAtOnce, k_raw[i], v_raw[i]);
#pragma unroll
        for (int e = 0; e < kElems; ++e) score = fmaf(q[e], k[e], score);
#pragma unroll
        for (int bit = 1; bit < kLanes; bit *= 2) score += __shfl_xor_sync(kAllLanes, score, bit);
        if (at >= end) continue;
        const float next = fmaxf(largest, score);
        const float shrink = power(largest, next), weight = power(score, next);
        largest = next;
        sum = fmaf(sum, shrink, weight);
#pragma unroll
        for (int e = 0; e < kElems; ++e) out[e] = fmaf(weight, v[e], out[e] * shrink);
      }
    }
    // What follows goes over the warp's positions.
    float most = largest;
#pragma unroll
    for (int bit = kLanes; bit < kWarpSize; bit *= 2)
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, bit));
    const float shrink = power(largest, most);
    const auto over_positions = [&](float value) {
      value *= shrink;
#pragma unroll
      for (int bit = kLanes; bit < kWarpSize; bit *= 2) value += __shfl_xor_sync(kAllLanes, value, bit);
      return value;
    };
    const int warp = threadIdx.x / kWarpSize;
    const bool writes = threadIdx.x % kWarpSize < kLanes;
    sum = over_positions(sum);
#pragma unroll
    for (int e = 0; e < kElems; ++e) {
      out[e] = over_positions(out[e]);
      if (writes) partials.warp_outputs[warp][lane() * kElems + e] = out[e];
    }
    if (threadIdx.x % kWarpSize == 0) partials.warp_maxima[warp] = most, partials.warp_sums[warp] = sum;
  }

  // Sums over the warps and sends the sums to all blocks: four threads have a feature, two blocks each.
  __device__ __forceinline__ void exchange(HeadPartials& partials, const Inbox& inbox) const {
    const int d = threadIdx.x / 4, to = threadIdx.x % 4 * 2;
    if (d >= kClusterHeadDim) return;
    float largest = -INFINITY, sum = 0.f, out = 0.f;
#pragma unroll
    for (int w = 0; w < kClusterWarps; ++w) largest = fmaxf(largest, partials.warp_maxima[w]);
#pragma unroll
    for (int w = 0; w < kClusterWarps; ++w) {
      const float weight = power(partials.warp_maxima[w], largest);
      sum = fmaf(partials.warp_sums[w], weight, sum);
      out = fmaf(partials.warp_outputs[w][d], weight, out);
    }
#pragma unroll
    for (int r = to; r < to + 2; ++r) {
      inbox.send(&partials.outputs[rank][d], r, out);
      if (d > 0) continue;
      inbox.send(&partials.maxima[rank], r, largest);
      inbox.send(&partials.sums[rank], r, sum);
    }
  }
};

#endif

}  // namespace hf_fastpath
