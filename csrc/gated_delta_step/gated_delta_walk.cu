// What: the steps of gated_delta_step.cu for the tokens of a prompt, one after the other.
// Work split: a block takes 32 columns of a head's state and keeps them in registers, four lanes a column.
//   The readers norm q and k and compute gates and q^T k; a token then costs a walker k^T g S and q^T g S,
//   two exchanges among four lanes, and the update.
// Traffic: the state once in each direction; q and k of a head once for each 32 columns.
// Roofline: the instructions of a walker: 4 for each row of its column, and the latency of one chain a token.
// Experiments: docs/lab/recording.md

#include "common/async.cuh"
#include "common/inverse_root.cuh"
#include "common/token_tiles.cuh"
#include "gated_delta_step/gated_delta_step.h"

namespace hf_fastpath {
namespace {

// What a tile of tokens needs. kKey: elements of a key, filled up with zeros.
template <int kKey, bool kPerElement>
struct alignas(16) DeltaTile {
  static constexpr int kFit = (kPerElement ? 1024 : 2048) / kKey;  // both tiles are within 48 KB
  static constexpr int kTokens = kFit < 16 ? kFit : 16;
  float q[kTokens][kKey], k[kTokens][kKey];  // normed, q with its scale
  float decay[kTokens][kPerElement ? kKey : 1];
  float v[kTokens][kWalkColumns];
  float beta[kTokens], overlap[kTokens];  // overlap: q^T k
};

template <class T, int kKey, bool kPerElement>
__global__ void __launch_bounds__(kWalkers + kReaders, kKey > 128 ? 1 : 2)
    gated_delta_walk(GatedDeltaParams p, int slices) {
  using Tile = DeltaTile<kKey, kPerElement>;
  constexpr int kRows = kKey / kLanesOfColumn, kTokens = Tile::kTokens;
  __shared__ Tile tiles[2];
  const int lane = threadIdx.x % kWarpSize;
  const int k_dim = static_cast<int>(p.k_dim), v_dim = static_cast<int>(p.v_dim);
  const int heads = static_cast<int>(p.v_heads), tokens = static_cast<int>(p.tokens);
  const int head_of_all = blockIdx.x / slices, slice = blockIdx.x % slices;
  const int64_t begin = int64_t(head_of_all / heads) * tokens;  // the first row of the sequence
  const int head = head_of_all % heads, k_head = head / (heads / static_cast<int>(p.k_heads));
  allow_next_kernel();
  if (!p.programmatic_launch) wait_for_previous_kernel();

  const int count = (tokens + kTokens - 1) / kTokens;

  if (threadIdx.x >= kWalkers) {
    // A lane reads some elements of a key, and one of v.
    constexpr int kElements = kKey / kWarpSize, kDecays = kPerElement ? kElements : 1;
    constexpr int kTokensOfWarp = kTokens / kReaderWarps;
    const int reader = (threadIdx.x - kWalkers) / kWarpSize;
    const int v_place = min(slice * kWalkColumns + lane, v_dim - 1);
    const auto element = [&](int i) { return min(lane + i * kWarpSize, k_dim - 1); };
    const float rate = expf(load_float_l2(p.a_log, head));
    float bias[kDecays];
#pragma unroll
    for (int i = 0; i < kDecays; ++i)
      bias[i] = load_float_l2(p.dt_bias, kPerElement ? int64_t(head) * k_dim + element(i) : head);
    wait_for_previous_kernel();  // for q, k, v and the gates
    const auto read = [&](Tile& tile, int index) {
      float q[kTokensOfWarp][kElements], k[kTokensOfWarp][kElements], a[kTokensOfWarp][kDecays];
      float v[kTokensOfWarp], b[kTokensOfWarp];
      const auto token_of = [&](int j) { return index * kTokens + j * kReaderWarps + reader; };
#pragma unroll
      for (int j = 0; j < kTokensOfWarp; ++j) {  // all loads first
        const int64_t row = begin + min(token_of(j), tokens - 1);
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
          q[j][i] = load_float_l2(head_of<T>(p.q, row, k_head) + element(i));
          k[j][i] = load_float_l2(head_of<T>(p.k, row, k_head) + element(i));
        }
#pragma unroll
        for (int i = 0; i < kDecays; ++i)
          a[j][i] = load_float_l2(head_of<T>(p.a, row, head) + (kPerElement ? element(i) : 0));
        b[j] = load_float_l2(head_of<T>(p.b, row, head));
        v[j] = load_float_l2(head_of<T>(p.v, row, head) + v_place);
      }
#pragma unroll
      for (int j = 0; j < kTokensOfWarp; ++j) {
        const int t = j * kReaderWarps + reader;
        const bool exists = token_of(j) < tokens;  // one that does not leaves the state as it is
        float q_q = 0.f, k_k = 0.f, q_k = 0.f;
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
          if (!exists || lane + i * kWarpSize >= k_dim) q[j][i] = k[j][i] = 0.f;
          q_q = fmaf(q[j][i], q[j][i], q_q);
          k_k = fmaf(k[j][i], k[j][i], k_k);
          q_k = fmaf(q[j][i], k[j][i], q_k);
        }
#pragma unroll
        for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
          q_q += __shfl_xor_sync(kAllLanes, q_q, offset);
          k_k += __shfl_xor_sync(kAllLanes, k_k, offset);
          q_k += __shfl_xor_sync(kAllLanes, q_k, offset);
        }
        const float q_factor = p.l2_norm ? p.scale * inverse_root<T>(q_q + kL2Eps) : p.scale;
        const float k_factor = p.l2_norm ? inverse_root<T>(k_k + kL2Eps) : 1.f;
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
          tile.q[t][lane + i * kWarpSize] = q_factor * q[j][i];
          tile.k[t][lane + i * kWarpSize] = k_factor * k[j][i];
        }
#pragma unroll
        for (int i = 0; i < kDecays; ++i) {
          const float decay = exists ? expf(-rate * softplus(a[j][i] + bias[i])) : 1.f;
          if (kPerElement || lane == 0) tile.decay[t][kPerElement ? lane + i * kWarpSize : 0] = decay;
        }
        tile.v[t][lane] = v[j];
        if (lane == 0) {
          tile.beta[t] = exists ? __fdividef(p.beta_scale, 1.f + expf(-b[j])) : 0.f;
          tile.overlap[t] = q_factor * k_factor * q_k;
        }
      }
    };
    return read_tiles(tiles, count, read);
  }

  const int part = threadIdx.x % kLanesOfColumn, own = threadIdx.x / kLanesOfColumn;
  const int column = slice * kWalkColumns + own;
  float* state = p.state + int64_t(head_of_all) * k_dim * v_dim + column;
  const auto is_mine = [&](int row) { return row < k_dim && column < v_dim; };
  float values[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = row_of_lane(i, part);
    values[i] = is_mine(row) ? load_float_l2(state + int64_t(row) * v_dim) : 0.f;
  }
  T* out = static_cast<T*>(p.out) + (begin * heads + head) * v_dim + column;
  const auto walk = [&](const Tile& tile, int index) {
    const int first = index * kTokens;
#pragma unroll(kRows < 32 ? 2 : 1)
    for (int t = 0; t < kTokens; ++t) {
      float4 k[kRows / 4], known = {}, seen = {};
#pragma unroll
      for (int c = 0; c < kRows / 4; ++c) {
        const int place = (c * kLanesOfColumn + part) * 4;
        k[c] = *reinterpret_cast<const float4*>(&tile.k[t][place]);
        const float4 q = *reinterpret_cast<const float4*>(&tile.q[t][place]);
        float4 decay;
        if constexpr (kPerElement) {
          decay = *reinterpret_cast<const float4*>(&tile.decay[t][place]);
        } else {
          decay.x = decay.y = decay.z = decay.w = tile.decay[t][0];
        }
        float* s = values + 4 * c;
        s[0] *= decay.x, s[1] *= decay.y, s[2] *= decay.z, s[3] *= decay.w;
        known.x = fmaf(k[c].x, s[0], known.x), known.y = fmaf(k[c].y, s[1], known.y);
        known.z = fmaf(k[c].z, s[2], known.z), known.w = fmaf(k[c].w, s[3], known.w);
        seen.x = fmaf(q.x, s[0], seen.x), seen.y = fmaf(q.y, s[1], seen.y);
        seen.z = fmaf(q.z, s[2], seen.z), seen.w = fmaf(q.w, s[3], seen.w);
      }
      const float delta = tile.beta[t] * (tile.v[t][own] - sum_of_column(sum_of(known)));
#pragma unroll
      for (int c = 0; c < kRows / 4; ++c) {
        float* s = values + 4 * c;
        s[0] = fmaf(k[c].x, delta, s[0]), s[1] = fmaf(k[c].y, delta, s[1]);
        s[2] = fmaf(k[c].z, delta, s[2]), s[3] = fmaf(k[c].w, delta, s[3]);
      }
      const float result = fmaf(tile.overlap[t], delta, sum_of_column(sum_of(seen)));
      if (part == 0 && column < v_dim && first + t < tokens)
        out[int64_t(first + t) * heads * v_dim] = from_float<T>(result);
    }
  };
  walk_tiles(tiles, count, walk);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = row_of_lane(i, part);
    if (is_mine(row)) state[int64_t(row) * v_dim] = values[i];
  }
}

template <class T, bool kPerElement>
void launch(const GatedDeltaParams& p, cudaStream_t stream) {
  const int64_t slices = (p.v_dim + kWalkColumns - 1) / kWalkColumns;
  const auto kernel = p.k_dim <= 32    ? gated_delta_walk<T, 32, kPerElement>
                      : p.k_dim <= 64  ? gated_delta_walk<T, 64, kPerElement>
                      : p.k_dim <= 128 ? gated_delta_walk<T, 128, kPerElement>
                                       : gated_delta_walk<T, 256, kPerElement>;
  static_assert(kMaxDeltaKey == 256, "the last kernel takes every key");
  const dim3 grid(static_cast<unsigned>(p.batch * p.v_heads * slices)), block(kWalkers + kReaders);
  const size_t smem_bytes = 0;
  const bool programmatic_launch = true;  // else the kernel waits before it reads
  HF_FASTPATH_CUDA_CHECK(launch_programmatic(kernel, grid, block, smem_bytes, stream, programmatic_launch, p,
                                             static_cast<int>(slices)));
}

}  // namespace

void launch_gated_delta_walk(const GatedDeltaParams& p, cudaStream_t stream) {
  with_type(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    return p.per_element ? launch<T, true>(p, stream) : launch<T, false>(p, stream);
  });
}

}  // namespace hf_fastpath
