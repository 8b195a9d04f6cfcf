// What: the steps of selective_state_step.cu for the tokens of a prompt, one after the other.
// Work split: a block takes 32 channels of a head and keeps their states in registers, four lanes a channel.
//   The readers compute time steps, what they add to the state, and gates; a token then costs a walker two
//   products and one sum for each place, and an exchange among four lanes, on which nothing waits.
// Traffic: the state once in each direction; b and c of a group once for each 32 channels.
// Roofline: the instructions of a walker; for Mamba-1 an exponential for each place.
// Experiments: docs/lab/recording.md

#include "common/activation.cuh"
#include "common/async.cuh"
#include "common/token_tiles.cuh"
#include "selective_state_step/selective_state_step.h"

namespace hf_fastpath {
namespace {

constexpr float kLog2E = 1.4426950408889634f;

// What a tile of tokens needs. kState: places of a channel's state, filled up with zeros.
template <int kState, bool kPerChannel>
struct alignas(16) StateTile {
  static constexpr int kFit = (kPerChannel && kState > 64 ? 1024 : 2048) / kState;  // both within 48 KB
  static constexpr int kMost = kState > 16 ? 16 : 32;
  static constexpr int kTokens = kFit < kReaderWarps ? kReaderWarps : kFit < kMost ? kFit : kMost;
  float b[kTokens][kState], c[kTokens][kState];
  float added[kTokens][kWalkColumns];                   // time step times x
  float skipped[kTokens][kWalkColumns];                 // d times x
  float gate[kTokens][kWalkColumns];                    // silu(z), or 1
  float step[kTokens][kPerChannel ? kWalkColumns : 1];  // time step of a channel, or decay of the head
};

template <class T, int kState, bool kPerChannel>
__global__ void __launch_bounds__(kWalkers + kReaders, kState > 128 ? 1 : 2)
    selective_state_walk(SelectiveStateParams p, int slices) {
  using Tile = StateTile<kState, kPerChannel>;
  constexpr int kRows = kState / kLanesOfColumn, kTokens = Tile::kTokens;
  __shared__ Tile tiles[2];
  const int lane = threadIdx.x % kWarpSize;
  const int heads = static_cast<int>(p.heads), head_dim = static_cast<int>(p.head_dim);
  const int state_size = static_cast<int>(p.state_size), tokens = static_cast<int>(p.tokens);
  const int head_of_all = blockIdx.x / slices, slice = blockIdx.x % slices;
  const int64_t begin = int64_t(head_of_all / heads) * tokens;  // the first row of the sequence
  const int head = head_of_all % heads, group = head / (heads / static_cast<int>(p.groups));
  allow_next_kernel();
  wait_for_previous_kernel();

  const int count = (tokens + kTokens - 1) / kTokens;

  if (threadIdx.x >= kWalkers) {
    // A lane reads some places of b and c, and what one channel has.
    constexpr int kElements = (kState + kWarpSize - 1) / kWarpSize;
    constexpr int kTokensOfWarp = kTokens / kReaderWarps;
    const int reader = (threadIdx.x - kWalkers) / kWarpSize;
    const int read_channel = min(slice * kWalkColumns + lane, head_dim - 1);
    const int64_t of_parameter = kPerChannel ? int64_t(head) * head_dim + read_channel : head;
    const float bias = p.dt_bias.data ? load_float_l2(p.dt_bias, of_parameter) : 0.f;
    const float skip = p.d.data ? load_float_l2(p.d, of_parameter) : 0.f;
    const float rate = kPerChannel ? 0.f : expf(load_float_l2(p.a_log, head));

    const auto read = [&](Tile& tile, int index) {
      float b[kTokensOfWarp][kElements], c[kTokensOfWarp][kElements];
      float x[kTokensOfWarp], z[kTokensOfWarp], dt[kTokensOfWarp];
      const auto token_of = [&](int j) { return index * kTokens + j * kReaderWarps + reader; };
#pragma unroll
      for (int j = 0; j < kTokensOfWarp; ++j) {  // all loads first
        const int64_t row = begin + min(token_of(j), tokens - 1);
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
          const int place = min(lane + i * kWarpSize, state_size - 1);
          b[j][i] = load_float_l2(head_of<T>(p.b, row, group) + place);
          c[j][i] = load_float_l2(head_of<T>(p.c, row, group) + place);
        }
        x[j] = load_float_l2(head_of<T>(p.x, row, head) + read_channel);
        z[j] = p.z.data ? load_float_l2(head_of<T>(p.z, row, head) + read_channel) : 0.f;
        dt[j] = load_float_l2(head_of<T>(p.dt, row, head) + (kPerChannel ? read_channel : 0));
      }
#pragma unroll
      for (int j = 0; j < kTokensOfWarp; ++j) {
        const int t = j * kReaderWarps + reader;
        const bool exists = token_of(j) < tokens;  // one that does not leaves the state as it is
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
          const int place = lane + i * kWarpSize;
          if (place >= kState) continue;
          tile.b[t][place] = place < state_size ? b[j][i] : 0.f;
          tile.c[t][place] = place < state_size ? c[j][i] : 0.f;
        }
        const float step = exists ? softplus(dt[j] + bias) : 0.f;
        tile.added[t][lane] = step * x[j];
        tile.skipped[t][lane] = skip * x[j];
        tile.gate[t][lane] = p.z.data ? silu<true>(z[j]) : 1.f;
        if constexpr (kPerChannel) {
          tile.step[t][lane] = step;
        } else if (lane == 0) {
          tile.step[t][0] = expf(-step * rate);
        }
      }
    };
    return read_tiles(tiles, count, read);
  }

  const int part = threadIdx.x % kLanesOfColumn, own = threadIdx.x / kLanesOfColumn;
  const int channel = slice * kWalkColumns + own;
  float* state = p.state + (int64_t(head_of_all) * head_dim + channel) * state_size;
  const auto is_mine = [&](int row) { return row < state_size && channel < head_dim; };
  float values[kRows], rates[kPerChannel ? kRows : 1];  // a rate of decay, so that exp2f(step * rate) decays
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = row_of_lane(i, part);
    values[i] = is_mine(row) ? load_float_l2(state + row) : 0.f;
    if constexpr (kPerChannel) {
      const int64_t place = (int64_t(head) * head_dim + channel) * state_size + row;
      rates[i] = is_mine(row) ? -kLog2E * expf(load_float_l2(p.a_log, place)) : 0.f;
    }
  }
  T* out = static_cast<T*>(p.out) + (begin * heads + head) * head_dim + channel;
  const auto walk = [&](const Tile& tile, int index) {
    const int first = index * kTokens;
#pragma unroll(kRows < 32 ? 4 : 1)
    for (int t = 0; t < kTokens; ++t) {
      const float step = tile.step[t][kPerChannel ? own : 0], added = tile.added[t][own];
      float4 sum = {};
#pragma unroll
      for (int i = 0; i < kRows / 4; ++i) {
        const int place = (i * kLanesOfColumn + part) * 4;
        const float4 b = *reinterpret_cast<const float4*>(&tile.b[t][place]);
        const float4 c = *reinterpret_cast<const float4*>(&tile.c[t][place]);
        float* s = values + 4 * i;
        const auto decay = [&](int e) {
          if constexpr (kPerChannel) return exp2f(step * rates[4 * i + e]);
          return step;
        };
        s[0] = fmaf(decay(0), s[0], added * b.x), s[1] = fmaf(decay(1), s[1], added * b.y);
        s[2] = fmaf(decay(2), s[2], added * b.z), s[3] = fmaf(decay(3), s[3], added * b.w);
        sum.x = fmaf(s[0], c.x, sum.x), sum.y = fmaf(s[1], c.y, sum.y);
        sum.z = fmaf(s[2], c.z, sum.z), sum.w = fmaf(s[3], c.w, sum.w);
      }
      const float y = (sum_of_column(sum_of(sum)) + tile.skipped[t][own]) * tile.gate[t][own];
      if (part == 0 && channel < head_dim && first + t < tokens)
        out[int64_t(first + t) * heads * head_dim] = from_float<T>(y);
    }
  };
  walk_tiles(tiles, count, walk);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = row_of_lane(i, part);
    if (is_mine(row)) state[row] = values[i];
  }
}

template <class T, bool kPerChannel>
void launch(const SelectiveStateParams& p, cudaStream_t stream) {
  const int64_t slices = (p.head_dim + kWalkColumns - 1) / kWalkColumns;
  const auto kernel = p.state_size <= 16    ? selective_state_walk<T, 16, kPerChannel>
                      : p.state_size <= 64  ? selective_state_walk<T, 64, kPerChannel>
                      : p.state_size <= 128 ? selective_state_walk<T, 128, kPerChannel>
                                            : selective_state_walk<T, 256, kPerChannel>;
  static_assert(kMaxWalkedState == 256, "the last kernel takes every state");
  const dim3 grid(static_cast<unsigned>(p.batch * p.heads * slices)), block(kWalkers + kReaders);
  const size_t smem_bytes = 0;
  const bool programmatic_launch = true;  // nothing is read before the wait
  HF_FASTPATH_CUDA_CHECK(launch_programmatic(kernel, grid, block, smem_bytes, stream, programmatic_launch, p,
                                             static_cast<int>(slices)));
}

}  // namespace

void launch_selective_state_walk(const SelectiveStateParams& p, cudaStream_t stream) {
  with_type(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    return p.per_channel ? launch<T, true>(p, stream) : launch<T, false>(p, stream);
  });
}

}  // namespace hf_fastpath
