// What: softmax(scale * q @ K.T) @ V of 1 to 16 new tokens over the visible positions of a KV cache, in one
//   pass, on CUDA cores: any pair of types, quants with scales among them, float32 arithmetic. See
//   decode_attention_mma.cu for queries and caches in the same 16-bit type.
// Work split: grid (splits, KV heads * row blocks, batch rows). A block takes one chunk of positions (see
//   split.cuh) and kRows rows, that is queries of the KV head's group of heads, so that K and V are read once
//   for all of them. kLanes lanes of a warp share a position, each owning 16-byte pieces of its K and V; the
//   warp works on 32 / kLanes * kUnroll positions at a time and keeps the next ones' K and V in flight in
//   registers. Scores are summed over the lanes of a position, softmax is online, and the last block of a KV
//   head to finish merges the splits.
// Traffic: 2 * positions * head_dim * sizeof(KV) a KV head and batch row, plus splits * rows * (head_dim + 2)
//   * 4 bytes of partial results through L2.
// Roofline: read bandwidth for long caches, memory latency for short ones. 38 % of read bandwidth for
//   float32, 32/8 heads of 128, 4096 positions (H200, 2026-11).

#include "common/async.cuh"
#include "common/kv_quants.cuh"
#include "decode_attention/decode_attention.h"
#include "decode_attention/merge.cuh"
#include "decode_attention/scores.cuh"

namespace hf_fastpath {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarpSize;
// Blocks an SM runs at once: registers for the queries and the sums, both of kRows rows, bound it, and of
// quants their scales, of pages the table.
template <class KV>
constexpr int kMostForThree = kIsQuant<KV>      ? 1
                              : sizeof(KV) == 2 ? 2
                                                : 4;  // rows times chunks
template <class KV, int kLanes, int kChunks, int kRows, bool kPaged>
constexpr int kBlocksPerSm = !kPaged && kRows * kChunks <= kMostForThree<KV> && kLanes > 4 ? 3 : 2;

// Sums kCount values over groups of kLanes neighboring lanes at once; see warp_sums. A lane ends with values
// `group_sums_first` and the following kCount / kLanes - 1 in front.
template <int kCount, int kLanes>
__device__ __forceinline__ void group_sums(float (&values)[kCount], int lane) {
  int count = kCount;
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    if (count > 1) {
      const bool upper = lane & offset;
      count /= 2;
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) {
        if (i < count) {
          const float keep = upper ? values[i + count] : values[i];
          const float send = upper ? values[i] : values[i + count];
          values[i] = keep + __shfl_xor_sync(kAllLanes, send, offset);
        }
      }
    } else {
      values[0] += __shfl_xor_sync(kAllLanes, values[0], offset);
    }
  }
}

// A lane's piece of a position: 16 bytes, or 8 quants.
template <class KV>
constexpr int kPieceElems = kIsQuant<KV> ? 8 : kVecElems<KV>;
template <class KV, bool kQuants = kIsQuant<KV>>
struct KvPiece {
  using Type = Chunk<KV, kVecElems<KV>>;
};
template <class KV>
struct KvPiece<KV, true> {
  using Type = QuantChunk<KV>;
};
template <class KV>
using KvChunk = typename KvPiece<KV>::Type;

// KV: type of the caches. kLanes: lanes a position. kChunks: pieces a lane owns of it. kRows: rows a
// block. kPaged: the caches lie in pages.
template <class KV, int kLanes, int kChunks, int kRows, bool kPaged>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<KV, kLanes, kChunks, kRows, kPaged>)
    decode_attention_kernel(DecodeAttentionParams p) {
  using C = KvChunk<KV>;
  constexpr int kElems = kPieceElems<KV>;
  constexpr int kGroups = kWarpSize / kLanes;  // positions side by side in a warp
  constexpr int kUnroll = kRows <= 4 ? 4 : 2;  // positions a group works on at once
  constexpr int kWarpStep = kGroups * kUnroll, kStep = kWarps * kWarpStep;
  constexpr int kScores = kUnroll * kRows;
  constexpr int kScoresPerLane = kScores > kLanes ? kScores / kLanes : 1;
  constexpr int kLanesPerScore = kLanes > kScores ? kLanes / kScores : 1;
  constexpr int kDims = kLanes * kChunks * kElems;  // head_dim rounded up to what the lanes own
  __shared__ __align__(16) float scores[kWarps][kGroups][kScores];
  extern __shared__ __align__(16) char shared[];

  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int member = lane % kLanes, group = lane / kLanes;
  const int batch_row = blockIdx.z, row_block = divide(blockIdx.y, p.num_kv_heads_inverse);
  const int kv_head = blockIdx.y - row_block * p.num_kv_heads;
  const Rows rows{row_block * kRows, kRows};

  allow_next_kernel();
  const auto s = find_split<kPaged>(p, batch_row, kv_head, blockIdx.x, gridDim.x, 0, sizeof(KV));
  if (int(blockIdx.x) >= s.active) return;

  // Rolling loads: each register is refilled as soon as its position is done.
  typename C::Raw k_raw[kUnroll][kChunks], v_raw[kUnroll][kChunks];
  const auto load = [&](const char* cache, int position, typename C::Raw(&raw)[kChunks]) {
    // The slot of a position behind the last may be none, and in pages it is looked up.
    const int i = kPaged && position >= s.end ? 0 : position - s.begin;
    const uint64_t row = uint64_t(s.slot(i)) * uint32_t(p.head_dim);
    const KV* at = reinterpret_cast<const KV*>(cache) + row;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int dim = (c * kLanes + member) * kElems;
      raw[c] = position < s.end && dim < p.head_dim ? C::load_streaming_l2(at + dim) : C::zero();
    }
  };
  int position = s.begin + warp * kWarpStep + group;  // of unroll step 0
  const bool is_old = s.begin + (warp + 1) * kWarpStep <= s.seq_len - p.query_len;
  if (!is_old) wait_for_previous_kernel();  // it appends the newest positions
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) load(s.k, position + u * kGroups, k_raw[u]);
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) load(s.v, position + u * kGroups, v_raw[u]);
  // Quants have the same for their scales, times what dequantized quants are short of.
  Scales scales{};
  if constexpr (kIsQuant<KV>) scales = find_scales(p, s, batch_row, kv_head);
  const auto load_scale = [&](const uint16_t* from, int position) {
    if (position >= s.end) return 0.f;
    return bfloat16_bits_to_float(__ldcg(from + s.slot(position - s.begin))) * (1.f / kQuantUnit<KV>);
  };
  float k_scale[kUnroll], v_scale[kUnroll];
  if constexpr (kIsQuant<KV>) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      k_scale[u] = load_scale(scales.k, position + u * kGroups);
      v_scale[u] = load_scale(scales.v, position + u * kGroups);
    }
  }
  if (is_old) wait_for_previous_kernel();

  float q[kRows][kChunks * kElems];
  float slope[kRows];
  int row_first[kRows], row_last[kRows];  // positions each row sees, up to the block's last
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const bool present = r < rows.count(p);
    const RowPlace place = row_place(p, s, kv_head, present ? rows.first + r : 0);
    const int newest = s.seq_len - p.query_len + place.token;
    row_first[r] = s.first_visible(newest, p.window);
    row_last[r] = present ? min(newest, s.end - 1) : -1;
    slope[r] = slope_of(p, batch_row, place.head);
    const int64_t at = out_offset(p, batch_row, place);  // q lies like the output
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int dim = (c * kLanes + member) * kElems;
      float some[kElems] = {};
      if (present && dim < p.head_dim) load_as_floats(p.q, at + dim, p.dtype, some);
#pragma unroll
      for (int e = 0; e < kElems; ++e) q[r][c * kElems + e] = some[e] * (p.scale * kLog2e);
    }
  }

  float max_score[kRows], sum[kRows], acc[kRows][kChunks * kElems];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    max_score[r] = -INFINITY;
    sum[r] = 0.f;
#pragma unroll
    for (int d = 0; d < kChunks * kElems; ++d) acc[r][d] = 0.f;
  }

#pragma unroll 1
  for (; position - group < s.end; position += kStep) {
    float partial[kScores];  // [kUnroll][kRows]
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) partial[u * kRows + r] = 0.f;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        float k[kElems];
        C::unpack(k_raw[u][c], k);
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
          for (int e = 0; e < kElems; ++e) {
            partial[u * kRows + r] = fmaf(q[r][c * kElems + e], k[e], partial[u * kRows + r]);
          }
      }
      load(s.k, position + kStep + u * kGroups, k_raw[u]);
    }

    // Every lane of the group needs every score: sum them lane by lane, then share through shared memory.
    group_sums<kScores, kLanes>(partial, lane);
    __syncwarp();  // the last step's scores have been read
    if (member % kLanesPerScore == 0) {
#pragma unroll
      for (int i = 0; i < kScoresPerLane; ++i) {
        scores[warp][group][member / kLanesPerScore * kScoresPerLane + i] = partial[i];
      }
    }
    __syncwarp();  // all scores of the step
    float weight[kScores];
#pragma unroll
    for (int i = 0; i < kScores; ++i) weight[i] = scores[warp][group][i];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int at = position + u * kGroups;
      if constexpr (kIsQuant<KV>) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) weight[u * kRows + r] *= k_scale[u];
        k_scale[u] = load_scale(scales.k, at + kStep);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        weight[u * kRows + r] = changed_score<true>(p, weight[u * kRows + r], slope[r], at, s.seq_len);
        if (at > row_last[r] || at < row_first[r]) weight[u * kRows + r] = -INFINITY;
      }
    }

    bool grew = false;
    float shrink[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float max = max_score[r];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) max = fmaxf(max, weight[u * kRows + r]);
      shrink[r] = exp2_below(max_score[r], max);
      grew = grew || max > max_score[r];
      max_score[r] = max;
    }
    if (__any_sync(kAllLanes, grew)) {  // rarely after the first steps
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        sum[r] *= shrink[r];
#pragma unroll
        for (int d = 0; d < kChunks * kElems; ++d) acc[r][d] *= shrink[r];
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        weight[u * kRows + r] = exp2_below(weight[u * kRows + r], max_score[r]);
        sum[r] += weight[u * kRows + r];
        if constexpr (kIsQuant<KV>) weight[u * kRows + r] *= v_scale[u];
      }
      if constexpr (kIsQuant<KV>) v_scale[u] = load_scale(scales.v, position + u * kGroups + kStep);
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        float v[kElems];
        C::unpack(v_raw[u][c], v);
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
          for (int e = 0; e < kElems; ++e) {
            acc[r][c * kElems + e] = fmaf(weight[u * kRows + r], v[e], acc[r][c * kElems + e]);
          }
      }
      load(s.v, position + kStep + u * kGroups, v_raw[u]);
    }
  }

  // One result a warp: merge the groups, which saw different positions.
  using Results = WarpResults<kWarps, kDims>;
  const Results results{shared, Results::bytes(kRows)};
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int offset = kLanes; offset < kWarpSize; offset *= 2) {
      const float max = fmaxf(max_score[r], __shfl_xor_sync(kAllLanes, max_score[r], offset));
      const float shrink = exp2_below(max_score[r], max);
      max_score[r] = max;
      sum[r] *= shrink;
      sum[r] += __shfl_xor_sync(kAllLanes, sum[r], offset);
#pragma unroll
      for (int d = 0; d < kChunks * kElems; ++d) {
        acc[r][d] *= shrink;
        acc[r][d] += __shfl_xor_sync(kAllLanes, acc[r][d], offset);
      }
    }
    if (group == 0) {
      float* out = results.outputs(warp) + r * kDims;
#pragma unroll
      for (int d = 0; d < kChunks * kElems; ++d) {
        out[(d / kElems * kLanes + member) * kElems + d % kElems] = acc[r][d];
      }
      if (member == 0) results.max_sums(warp)[r] = make_float2(max_score[r], sum[r]);
    }
  }
  finish_block<void, true>(p, s, results, batch_row, kv_head, rows);
  trace(TracePoint::kEnd);
}

template <class KV, int kLanes, int kChunks, int kRows, bool kPaged>
void launch(const DecodeAttentionParams& p, cudaStream_t stream) {
  const dim3 grid = split_grid(p, kRows, kBlocksPerSm<KV, kLanes, kChunks, kRows, kPaged>), block(kThreads);
  const size_t smem_bytes = kWarps * WarpResults<kWarps, kLanes * kChunks * kPieceElems<KV>>::bytes(kRows);
  launch_attention(decode_attention_kernel<KV, kLanes, kChunks, kRows, kPaged>, grid, block, smem_bytes,
                   stream, p);
}

template <class KV, int kLanes, int kChunks>
void launch_rows(const DecodeAttentionParams& p, cudaStream_t stream) {
  if (p.pages.table) {  // rare with these types: one kernel for any number of rows
    if constexpr (!kIsQuant<KV>) launch<KV, kLanes, kChunks, 4, true>(p, stream);
    return;
  }
  const int rows = rows_per_kv_head(p);
  if (rows == 1) return launch<KV, kLanes, kChunks, 1, false>(p, stream);
  if (rows <= 4 || kChunks > 1) return launch<KV, kLanes, kChunks, 4, false>(p, stream);
  if constexpr (kChunks == 1) launch<KV, kLanes, kChunks, 8, false>(p, stream);
}

template <class KV>
void launch_head_dim(const DecodeAttentionParams& p, cudaStream_t stream) {
  const int chunks = (p.head_dim + kPieceElems<KV> - 1) / kPieceElems<KV>;  // pieces of a position
  if constexpr (kPieceElems<KV> == 8) {
    if (chunks <= 4) return launch_rows<KV, 4, 1>(p, stream);
  } else {
    if (chunks > 32) return launch_rows<KV, 32, 2>(p, stream);
  }
  if (chunks <= 8) return launch_rows<KV, 8, 1>(p, stream);
  if (chunks <= 16) return launch_rows<KV, 16, 1>(p, stream);
  launch_rows<KV, 32, 1>(p, stream);
}

}  // namespace

int64_t decode_attention_counter_bytes(const DecodeAttentionParams& params) {
  return int64_t(params.batch) * params.query_len * params.num_heads * int64_t(sizeof(unsigned));
}

int64_t decode_attention_workspace_bytes(const DecodeAttentionParams& params) {
  const int64_t rows = int64_t(params.batch) * params.query_len * params.num_heads;
  return rows * kMaxSplits * (params.head_dim + 2) * int64_t(sizeof(float)) +
         decode_attention_counter_bytes(params);
}

void launch_decode_attention(const DecodeAttentionParams& params, cudaStream_t stream) {
  if (params.batch == 0) return;
  if (!is_tuned_head_dim(params.head_dim)) return launch_decode_attention_any(params, stream);
  // Even one row a KV head, of the 8 a tensor core has, is faster there: converting K and V costs more than
  // the sums.
  if (params.kv_type == kv_type(params.dtype) && params.dtype != DType::kFloat32) {
    return params.pages.table ? launch_decode_attention_mma_paged(params, stream)
                              : launch_decode_attention_mma(params, stream);
  }
  if (fits_decode_attention_quants(params)) return launch_decode_attention_quants(params, stream);
  with_kv_type(params.kv_type, [&](auto zero) { launch_head_dim<decltype(zero)>(params, stream); });
}

}  // namespace hf_fastpath
