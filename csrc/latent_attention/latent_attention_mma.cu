// What: latent_attention in 16 bits, for the ranks of published models, on tensor cores: what a block finds
//   over its share of the positions, which merge_latents_kernel brings together.
// Work split: grid (splits, blocks of 16 heads, batch), four warps. A tile of 32 positions lies in shared
//   memory while the next one comes. Each warp multiplies the 16 queries with 8 positions; scores go through
//   shared memory to all warps, each of which finds the softmax of all heads for itself and multiplies the
//   weights with its own quarter of the latents' elements. So the latents are read once for keys and values
//   of 16 heads. Chunks of 16 bytes are swizzled: neither the queries' lanes, which take two rows of four
//   chunks, nor the weights', which take four rows of two, share a bank.
// Traffic: positions * (rank + rope_dim) * 2 bytes, once a block of heads; and 4 * rank bytes a head
//   and split.
// Roofline: memory bandwidth for 16 heads; latency for short texts. Positions that this call does not append
//   come while the kernel in front still runs.

#include <type_traits>

#include "common/cuda_check.cuh"
#include "common/heads.cuh"
#include "common/mma.cuh"
#include "common/warp.cuh"
#include "latent_attention/latent_attention.h"
#include "latent_attention/latent_range.cuh"

namespace hf_fastpath {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kRows = 16;               // heads of a block
constexpr int kTile = 8 * kWarps;       // positions at once
constexpr int kScorePitch = kTile + 4;  // floats: lanes of eight rows and four neighbors hit 32 banks
constexpr int kChunkElems = 8;          // of 16 bytes
static_assert(kMinLatentChunk % kTile == 0, "no tile is cut by a split");

// Where things lie in shared memory.
template <int kRank, int kRope>
struct Layout {
  static constexpr int kWidth = kRank + kRope, kChunks = kWidth / kChunkElems;
  static constexpr int kPitch = (kWidth * 2 + 127) / 128 * 128;  // bytes of a row
  static constexpr int kTileBytes = kTile * kPitch, kQueryBytes = kRows * kPitch;
  static constexpr int kScores = kQueryBytes + 2 * kTileBytes;
  static constexpr int kBytes = kScores + kRows * kScorePitch * int(sizeof(float));

  // Byte of a chunk in a tile or among the queries.
  static __device__ __forceinline__ int at(int row, int chunk) {
    return row * kPitch + (chunk ^ ((row & 1) << 2 | (row & 2))) * 16;
  }
};

// Brings positions [position, end) of a tile on their way, without one that this call appends; zeros behind
// them.
template <class T, int kRank, int kRope>
__device__ __forceinline__ void load_tile(const LatentAttentionParams& p, const LatentRange& range, int row,
                                          int position, int end, unsigned char* tile) {
  using L = Layout<kRank, kRope>;
  for (int i = threadIdx.x; i < kTile * L::kChunks; i += kThreads) {
    const int r = i / L::kChunks, chunk = i % L::kChunks;
    const bool present = position + r < end;
    if (p.new_latent.data && present && position + r == range.last - 1) continue;
    const int64_t slot = int64_t(row) * range.capacity + (present ? position + r : 0);
    const T* from = chunk < kRank / kChunkElems
                        ? static_cast<const T*>(range.latents) + slot * kRank + chunk * kChunkElems
                        : static_cast<const T*>(range.rope_keys) + slot * kRope +
                              (chunk - kRank / kChunkElems) * kChunkElems;
    copy_async(tile + L::at(r, chunk), from, present);
  }
  commit_copies();
}

// The chunk of a rotary part from element e on, rotated if there are angles; all accesses are whole.
template <class T>
__device__ __forceinline__ void rotated_chunk(const LatentAttentionParams& p, int row, const T* x, int e,
                                              float (&values)[kChunkElems]) {
  using C = Chunk<T, kChunkElems>;
  if (!p.cos.data) return C::unpack(C::load_l2(x + e), values);
  const int half = static_cast<int>(p.rope_dim) / 2, pair = e < half ? e : e - half;
  const bool neighbors = p.rotation == Rotation::kNeighbors, first = e < half;
  const bool apart = p.rotation == Rotation::kHalves;
  // Two chunks with the low and high elements of the pairs, or with whole pairs.
  const int low = neighbors ? e : apart ? pair : 2 * pair;
  const int high = neighbors ? e : apart ? pair + half : 2 * pair + kChunkElems;
  float a[kChunkElems], b[kChunkElems], cos[kChunkElems], sin[kChunkElems];
  C::unpack(C::load_l2(x + low), a), C::unpack(C::load_l2(x + high), b);
  C::unpack(C::load_l2(head_of<T>(p.cos, row, 0) + e), cos);
  C::unpack(C::load_l2(head_of<T>(p.sin, row, 0) + e), sin);
#pragma unroll
  for (int i = 0; i < kChunkElems; ++i) {
    constexpr int kHalf = kChunkElems / 2;
    const float of_pairs = i < kHalf ? a[2 * i % kChunkElems] : b[2 * i % kChunkElems];
    const float behind = i < kHalf ? a[2 * i % kChunkElems + 1] : b[2 * i % kChunkElems + 1];
    const float lower = apart ? a[i] : of_pairs, upper = apart ? b[i] : behind;
    float own = first ? lower : upper, other = first ? -upper : lower;
    if (neighbors) own = a[i], other = i % 2 == 0 ? -a[i ^ 1] : a[i ^ 1];
    values[i] = fmaf(other, sin[i], own * cos[i]);
  }
}

// Puts the position that this call appends, if it is one of those, into their tile, and into the cache if
// `appends`.
template <class T, int kRank, int kRope>
__device__ __forceinline__ void put_newest(const LatentAttentionParams& p, const LatentRange& range, int row,
                                           int position, int end, bool appends, unsigned char* tile) {
  using L = Layout<kRank, kRope>;
  using C = Chunk<T, kChunkElems>;
  static_assert(L::kChunks <= kThreads, "a thread takes a chunk");
  const int r = range.last - 1 - position, chunk = threadIdx.x, e = chunk * kChunkElems;
  if (!p.new_latent.data || r < 0 || r >= kTile || range.last > end || chunk >= L::kChunks) return;
  uint4 raw;
  if (e < kRank) {
    raw = C::load_l2(head_of<T>(p.new_latent, row, 0) + e);
  } else {
    float values[kChunkElems];
    rotated_chunk(p, row, head_of<T>(p.new_rope, row, 0), e - kRank, values);
    raw = C::pack(values);
  }
  *reinterpret_cast<uint4*>(tile + L::at(r, chunk)) = raw;
  if (!appends) return;
  const int64_t slot = int64_t(row) * range.capacity + range.last - 1;
  T* to = e < kRank ? static_cast<T*>(range.latents) + slot * kRank + e
                    : static_cast<T*>(range.rope_keys) + slot * kRope + e - kRank;
  *reinterpret_cast<uint4*>(to) = raw;
}

// Brings the queries on their way, those of no head as zeros.
template <class T, int kRank, int kRope>
__device__ __forceinline__ void load_queries(const LatentAttentionParams& p, int row, int first_head,
                                             unsigned char* queries) {
  using L = Layout<kRank, kRope>;
  using C = Chunk<T, kChunkElems>;
  constexpr int kPlain = kRank / kChunkElems, kTurned = L::kChunks - kPlain;
  for (int i = threadIdx.x; i < kRows * kPlain; i += kThreads) {
    const int r = i / kPlain, chunk = i % kPlain;
    const bool present = first_head + r < p.heads;
    const T* from = head_of<T>(p.q_latent, row, present ? first_head + r : first_head) + chunk * kChunkElems;
    copy_async(queries + L::at(r, chunk), from, present);
  }
  commit_copies();
  for (int i = threadIdx.x; i < kRows * kTurned; i += kThreads) {
    const int r = i / kTurned, chunk = i % kTurned;
    const bool present = first_head + r < p.heads;
    float values[kChunkElems];
    rotated_chunk(p, row, head_of<T>(p.q_rope, row, present ? first_head + r : first_head),
                  chunk * kChunkElems, values);
    *reinterpret_cast<uint4*>(queries + L::at(r, kPlain + chunk)) = present ? C::pack(values) : C::zero();
  }
}

// Lane 4 * g + q: g and q as in common/mma.cuh.
template <class T, int kRank, int kRope>
__global__ void __launch_bounds__(kThreads) latent_mma_kernel(LatentSplits s) {
  using L = Layout<kRank, kRope>;
  constexpr int kGroups = kRank / (64 * kWarps);  // of 64 elements, a warp's
  static_assert(kGroups * 64 * kWarps == kRank && L::kWidth % 32 == 0, "warps share the elements evenly");
  extern __shared__ __align__(128) unsigned char shared[];
  unsigned char* const queries = shared;
  unsigned char* const tiles = shared + L::kQueryBytes;
  float* const scores = reinterpret_cast<float*>(shared + L::kScores);
  const LatentAttentionParams& p = s.p;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, g = lane / 4, q = lane % 4;
  const int split = blockIdx.x, first_head = blockIdx.y * kRows, row = blockIdx.z;
  allow_next_kernel();
  // A kernel in front may have appended the newest position, if this call does not.
  if (!p.programmatic_launch || !p.new_latent.data) wait_for_previous_kernel();
  const LatentRange range(s, row);
  const int begin = range.begin(split), end = range.end(split);
  const bool is_active = split < range.active;
  if (is_active) {
    load_tile<T, kRank, kRope>(p, range, row, begin, end, tiles);
    load_tile<T, kRank, kRope>(p, range, row, begin + kTile, end, tiles + L::kTileBytes);
  }
  wait_for_previous_kernel();
  const bool appends = blockIdx.y == 0;
  if (appends && range.active == 0 && split == 0)
    append_newest<T>(p, range, row);  // no block has it in a tile
  if (!is_active) return;
  load_queries<T, kRank, kRope>(p, row, first_head, queries);
  put_newest<T, kRank, kRope>(p, range, row, begin, end, appends, tiles);
  put_newest<T, kRank, kRope>(p, range, row, begin + kTile, end, appends, tiles + L::kTileBytes);
  wait_for_copies<0>();

  const float scale = p.scale * kLog2e;
  float acc[kGroups][4][2][4] = {};  // [64 elements, two of a lane's eight, heads in eights, of mma]
  float max[2] = {-INFINITY, -INFINITY}, total[2] = {};  // of heads g and g + 8
  int buffer = 0;
  for (int position = begin; position < end; position += kTile, buffer ^= 1) {
    const unsigned char* tile = tiles + buffer * L::kTileBytes;
    wait_for_copies<1>();
    __syncthreads();  // the tile; at first the queries

    float score[2][4] = {};  // two sums: half the chain of products
#pragma unroll
    for (int chunk = 0; chunk < L::kChunks; chunk += 4) {
      const uint4 a = *reinterpret_cast<const uint4*>(queries + L::at(g, chunk + q));
      const uint4 more = *reinterpret_cast<const uint4*>(queries + L::at(g + 8, chunk + q));
      const uint4 b = *reinterpret_cast<const uint4*>(tile + L::at(warp * 8 + g, chunk + q));
      mma<T>(score[0], a.x, more.x, a.y, more.y, b.x, b.y);
      mma<T>(score[1], a.z, more.z, a.w, more.w, b.z, b.w);
    }
    const int place = warp * 8 + 2 * q;  // of two positions in the tile
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float2 pair = make_float2((score[0][2 * half] + score[1][2 * half]) * scale,
                                (score[0][2 * half + 1] + score[1][2 * half + 1]) * scale);
      if (position + place >= end) pair.x = -INFINITY;
      if (position + place + 1 >= end) pair.y = -INFINITY;
      *reinterpret_cast<float2*>(scores + (g + 8 * half) * kScorePitch + place) = pair;
    }
    __syncthreads();  // the scores

    // Positions 16 k + q + 4 i of the tile are this lane's in step k.
    float weight[2][2][4], shrink[2];  // [heads g and g + 8][k][i]
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = max[half];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          weight[half][k][i] = scores[(g + 8 * half) * kScorePitch + 16 * k + q + 4 * i];
          top = fmaxf(top, weight[half][k][i]);
        }
      }
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
      shrink[half] = exp2_below(max[half], top);
      max[half] = top;
      total[half] *= shrink[half];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          weight[half][k][i] = exp2_below(weight[half][k][i], top);
          total[half] += weight[half][k][i];
        }
      }
    }
    // Accumulators hold heads 2q and 2q + 1 of each eight.
    float factor[2][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      factor[half][0] = __shfl_sync(kAllLanes, shrink[half], 8 * q);
      factor[half][1] = __shfl_sync(kAllLanes, shrink[half], 8 * q + 4);
    }
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int e = 0; e < 4; ++e) acc[group][w][half][e] *= factor[half][e % 2];
        }
      }
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      uint32_t b[2][2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        b[half][0] = pack2(weight[half][k][0], weight[half][k][1], T());
        b[half][1] = pack2(weight[half][k][2], weight[half][k][3], T());
      }
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const int chunk = (warp * kGroups + group) * 8 + g;
        uint32_t rows[4][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint4 found = *reinterpret_cast<const uint4*>(tile + L::at(16 * k + q + 4 * i, chunk));
          rows[i][0] = found.x, rows[i][1] = found.y, rows[i][2] = found.z, rows[i][3] = found.w;
        }
#pragma unroll
        for (int w = 0; w < 4; ++w) {
#pragma unroll
          for (int half = 0; half < 2; ++half)
            mma_columns<T>(acc[group][w][half], rows[0][w], rows[1][w], rows[2][w], rows[3][w], b[half][0],
                           b[half][1]);
        }
      }
    }
    __syncthreads();  // tile and scores are free
    load_tile<T, kRank, kRope>(p, range, row, position + 2 * kTile, end, tiles + buffer * L::kTileBytes);
    put_newest<T, kRank, kRope>(p, range, row, position + 2 * kTile, end, appends,
                                tiles + buffer * L::kTileBytes);
  }
  wait_for_copies<0>();

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    total[half] += __shfl_xor_sync(kAllLanes, total[half], 1);
    total[half] += __shfl_xor_sync(kAllLanes, total[half], 2);
  }
  const int64_t of_row = int64_t(row) * p.heads;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int own = first_head + g + 8 * half;
    if (warp == 0 && q == 0 && own < p.heads)
      s.max_sums[(of_row + own) * s.splits + split] = make_float2(max[half], total[half]);
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int head = first_head + 8 * half + 2 * q + odd;
      if (head >= p.heads) continue;
      float* to = s.outputs + ((of_row + head) * s.splits + split) * kRank + 8 * g;
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        // Word w of a lane's 16 bytes holds elements 2w, which are rows g, and 2w + 1, rows g + 8.
        float values[8];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          values[2 * w] = acc[group][w][half][odd];
          values[2 * w + 1] = acc[group][w][half][2 + odd];
        }
        float4* place = reinterpret_cast<float4*>(to + (warp * kGroups + group) * 64);
        place[0] = make_float4(values[0], values[1], values[2], values[3]);
        place[1] = make_float4(values[4], values[5], values[6], values[7]);
      }
    }
  }
}

template <class T, int kRank, int kRope>
void launch(const LatentSplits& s, cudaStream_t stream) {
  constexpr int kBytes = Layout<kRank, kRope>::kBytes;
  const LatentAttentionParams& p = s.p;
  const unsigned blocks = static_cast<unsigned>((p.heads + kRows - 1) / kRows);
  const dim3 grid(s.splits, blocks, static_cast<unsigned>(p.batch)), block(kThreads);
  const bool programmatic_launch = true;  // else the kernel waits before it reads
  allow_shared_memory(latent_mma_kernel<T, kRank, kRope>, kBytes);
  HF_FASTPATH_CUDA_CHECK(launch_programmatic(latent_mma_kernel<T, kRank, kRope>, grid, block, kBytes, stream,
                                             programmatic_launch, s));
}

// DeepSeek V2 and V3, Kimi, GLM-4.7-Flash; MiniCPM3.
constexpr bool is_large(const LatentAttentionParams& p) { return p.rank == 512 && p.rope_dim == 64; }
constexpr bool is_small(const LatentAttentionParams& p) { return p.rank == 256 && p.rope_dim == 32; }

}  // namespace

bool uses_latent_mma(const LatentAttentionParams& p) {
  for (const Heads& heads : {p.q_latent, p.q_rope, p.new_latent, p.new_rope, p.cos, p.sin}) {
    if (!is_aligned16(heads.data) || heads.batch_stride % kChunkElems || heads.head_stride % kChunkElems)
      return false;
  }
  return p.dtype != DType::kFloat32 && (is_large(p) || is_small(p)) &&
         (p.kv_table || (is_aligned16(p.latents) && is_aligned16(p.rope_keys)));
}

void launch_latent_mma(const LatentSplits& s, cudaStream_t stream) {
  with_type(s.p.dtype, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (!std::is_same_v<T, float>)
      return is_large(s.p) ? launch<T, 512, 64>(s, stream) : launch<T, 256, 32>(s, stream);
  });
}

}  // namespace hf_fastpath
