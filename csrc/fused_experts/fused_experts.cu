// What: the chosen experts of a mixture for few x rows: activation(x @ gate) * (x @ up) of every choice, then
//   the weighted sum of the products with down. Choices are read on the device. Experts without a gate have
//   up in its place, and activation(gate) * up is relu(up)^2.
// Work split: two kernels, 8 rows of x at a time. Gate and up: blockIdx.y is a choice (row, k), a warp takes
//   one feature of both matrices for every row that chose that expert; blocks of later choices of the same
//   expert end at once. Of one row the warps of as many blocks as an SM runs take features of all choices in
//   turn, those of a shared expert first, which they ask for while the kernel in front still runs; each block
//   finds choices, if a router's scores are given, and norms x by itself, in both kernels the same. Down: a
//   warp takes one output and walks through the chosen experts, adding each product to the rows that chose
//   it, so that sums run in one order and need no atomics. A lane keeps kLoads 16-byte loads in flight and
//   replaces each as it is consumed. Down starts early: what it reads before the other kernel is complete are
//   choices and its own first weights. On Hopper one row has a kernel of its own for down, in
//   fused_experts_row_down.cuh.
// Traffic: 3 * width * hidden_size * sizeof(T) once for each expert that any of 8 rows chose; x, hidden and
//   out are small. Without a gate 2 instead of 3, and the second load of a row of up comes out of L2.
// Roofline: read bandwidth. float16, Mixtral's 2 of 8 experts: 80 % of it for one row, 28 for 8, whose x
//   comes out of L2 for every feature; 8 of 128 of width 768: 56 and 34 % (H200, 2026-11). One row of the
//   latter in bfloat16: 78 % of an H100's 3.18 TB/s.
// Experiments: docs/lab/recording.md

#include <algorithm>
#include <type_traits>

#include "common/activation.cuh"
#include "common/async.cuh"
#include "common/numeric.cuh"
#include "common/warp.cuh"
#include "fused_experts/fused_experts.h"
#include "fused_experts/fused_experts_device.cuh"
#include "fused_experts/fused_experts_row.cuh"
#include "fused_experts/fused_experts_row_down.cuh"

namespace hf_fastpath {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;
// 16-byte loads of weights in flight a lane: 8 * 16 * 32 lanes * 16 warps are 64 KB an SM, more than twice
// what the latency of device memory needs.
constexpr int kLoads = 8;
constexpr int kMinBlocks = 2;  // an SM: leaves 128 registers a thread
static_assert(kMaxX == kWarps, "a warp of the down kernel reads the choices of one row");
constexpr int kRowBlocks = 3;                // the same for one row, whose kernel is 5 % slower with 2 (H100)
constexpr int kUnroll = kLoads / 2;          // of gate and up
constexpr int kRound = kUnroll * kWarpSize;  // chunks of a row that a warp asks for at once
static_assert(kMostScored == kFewLogits * kWarpSize, "more take too many registers");

template <class T, int kElems, int kX>
__global__ void __launch_bounds__(kThreads, kMinBlocks) gate_up_kernel(FusedExpertsParams p) {
  using C = Chunk<T, kElems>;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int feature = blockIdx.x * kWarps + warp;
  // The next kernel reads choices before it waits: it may only start once the one that made them is complete.
  wait_and_allow_next_kernel();
  const ExpertWork<kX> work = find_work<kX>(p, lane);
  if (!work.is_some) return;

  const T* gate = stack_row<T>(p.gate_up, work.expert, min(feature, p.width - 1));
  const T* up = stack_row<T>(p.gate_up, work.expert, p.up_row + min(feature, p.width - 1));
  const T* x = static_cast<const T*>(p.x) + int64_t(work.first_row) * p.hidden_size;
  const int chunks = p.hidden_size / kElems;
  typename C::Raw raw[kUnroll][2];
  const auto load = [&](int u, int chunk) {
    const bool present = chunk < chunks;
    raw[u][0] = present ? C::load_once(gate + int64_t(chunk) * kElems) : C::zero();
    raw[u][1] = present ? C::load_once(up + int64_t(chunk) * kElems) : C::zero();
  };
  drop_l1();  // x comes through L1, which all warps of the SM share
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) load(u, u * kWarpSize + lane);
  float accumulators[2 * kX];
#pragma unroll
  for (int i = 0; i < 2 * kX; ++i) accumulators[i] = 0.f;
#pragma unroll 1
  for (int base = lane; base - lane < chunks; base += kUnroll * kWarpSize) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int chunk = base + u * kWarpSize;
      float w[2][kElems];
      C::unpack(raw[u][0], w[0]);
      C::unpack(raw[u][1], w[1]);
#pragma unroll
      for (int m = 0; m < kX; ++m) {
        if (work.source[m] < 0) continue;  // the same in all lanes
        float xs[kElems];
        C::unpack(
            chunk < chunks ? C::load(x + int64_t(m) * p.hidden_size + int64_t(chunk) * kElems) : C::zero(),
            xs);
#pragma unroll
        for (int e = 0; e < kElems; ++e) {
          accumulators[m] = fmaf(w[0][e], xs[e], accumulators[m]);
          accumulators[kX + m] = fmaf(w[1][e], xs[e], accumulators[kX + m]);
        }
      }
      load(u, chunk + kUnroll * kWarpSize);
    }
  }

  // float32 results keep every bit of a lane's sum, as in gemv_rows.cuh.
  std::conditional_t<sizeof(T) == 4, double, float> gate_accumulators[kX], up_accumulators[kX];
#pragma unroll
  for (int m = 0; m < kX; ++m)
    gate_accumulators[m] = accumulators[m], up_accumulators[m] = accumulators[kX + m];
  const float gate_sum = static_cast<float>(warp_sums<kX>(gate_accumulators, lane));
  const float up_sum = static_cast<float>(warp_sums<kX>(up_accumulators, lane));
  constexpr int kLanesPerRow = kWarpSize / kX;
  const int m = lane / kLanesPerRow;
  if (lane % kLanesPerRow != 0 || feature >= p.width) return;
  int chosen = -1;  // work.source[m], without an array indexed at run time
#pragma unroll
  for (int i = 0; i < kX; ++i) {
    if (i == m) chosen = work.source[i];
  }
  if (chosen < 0) return;
  T* hidden = static_cast<T*>(p.hidden) + (int64_t(work.first_row + m) * p.top_k + chosen) * p.width;
  hidden[feature] = from_float<T>(activate(gate_sum, p.activation) * up_sum);
}

// The same for one row. Warps take features of all chosen experts in turn and ask for those of the next
// before they have the sums of one, so that memory never rests. x: chunks of the row in shared memory, with
// zeros up to whole rounds. kPerLane: a router's scores a lane keeps.
template <class T, int kElems, int kPerLane>
__global__ void __launch_bounds__(kThreads, kRowBlocks) gate_up_row_kernel(FusedExpertsParams p) {
  using C = Chunk<T, kElems>;
  extern __shared__ __align__(16) char shared[];
  __shared__ Chosen<1> chosen;
  T* const x = reinterpret_cast<T*>(shared);
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int chunks = p.hidden_size / kElems;
  const int own = p.shared.places * p.width, step = gridDim.x * kWarps;
  int items = own;  // features; until choices are known those of the shared expert, which are in front
  int item = warp * gridDim.x + blockIdx.x;
  int next = item, next_chunk = 0;  // of the loads, with the lane; `chunks` behind the last item
  const T *gate = nullptr, *up = nullptr;
  typename C::Raw raw[kUnroll][2];
  const auto find_row = [&] {
    next_chunk = next < items ? lane : chunks;
    if (next >= items) return;
    if (next < own) {
      gate = static_cast<const T*>(p.shared.gate) + next * p.shared.gate_stride + lane * kElems;
      up = static_cast<const T*>(p.shared.up) + next * p.shared.up_stride + lane * kElems;
      return;
    }
    const int place = next / p.width;
    gate = stack_row<T>(p.gate_up, chosen.expert[place], next - place * p.width) + lane * kElems;
    up = gate + int64_t(p.up_row) * p.gate_up.row_stride;
  };
  const auto load = [&](int u) {
    const bool present = next_chunk + u * kWarpSize < chunks;
    raw[u][0] = present ? C::load_once(gate + u * kWarpSize * kElems) : C::zero();
    raw[u][1] = present ? C::load_once(up + u * kWarpSize * kElems) : C::zero();
  };
  const auto advance = [&] {
    gate += kRound * kElems, up += kRound * kElems, next_chunk += kRound;
    if (next_chunk - lane < chunks) return;
    next += step;
    find_row();
  };
  const auto start = [&] {
    find_row();
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) load(u);
  };

  prefetch_norm<T>(p);
  if (item < own) start();
  // The next kernel reads choices before it waits: it may only start once the one that made them is complete.
  wait_and_allow_next_kernel();
  if (warp == kWarps - 1) {
    OnlyRow<T, kPerLane>(p, lane).find(chosen);  // weights are down's
  } else {
    load_row<T, kElems, kWarps - 1>(p, padded_chunks<kElems, kRound>(p.hidden_size), warp, lane, x);
  }
  __syncthreads();  // choices and x
  items = chosen.count * p.width;
  if (item >= items) return;
  if (item >= own) start();
#pragma unroll 1
  for (; item < items; item += step) {
    float sums[2] = {0.f, 0.f};  // of gate and up
#pragma unroll 1
    for (int base = lane; base - lane < chunks; base += kRound) {
      advance();
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        float w[2][kElems], xs[kElems];
        C::unpack(raw[u][0], w[0]);
        C::unpack(raw[u][1], w[1]);
        C::unpack(reinterpret_cast<const typename C::Raw*>(x)[base + u * kWarpSize], xs);
#pragma unroll
        for (int e = 0; e < kElems; ++e) {
          sums[0] = fmaf(w[0][e], xs[e], sums[0]);
          sums[1] = fmaf(w[1][e], xs[e], sums[1]);
        }
        load(u);
      }
    }
    std::conditional_t<sizeof(T) == 4, double, float> wide[2] = {sums[0], sums[1]};
    const float sum = static_cast<float>(warp_sums<2>(wide, lane));
    const float up_sum = __shfl_sync(kAllLanes, sum, kWarpSize / 2);
    const int place = item / p.width, feature = item - place * p.width;
    T* hidden = static_cast<T*>(p.hidden) + int64_t(chosen.source[place][0]) * p.width;
    if (lane == 0) hidden[feature] = from_float<T>(activate(sum, p.activation) * up_sum);
  }
}

// Fills `chosen` with all threads; returns after a barrier.
template <int kX>
__device__ __forceinline__ void find_chosen(const FusedExpertsParams& p, int first_row, Chosen<kX>& chosen) {
  __shared__ int64_t ids[kX][kMaxTopK];
  __shared__ int found[kX];  // experts that a row is the first to choose
  const int lane = threadIdx.x % kWarpSize, m = threadIdx.x / kWarpSize;
  const int64_t id = m < kX ? choice(p, first_row + m, lane) : -1;
  if (m < kX) ids[m][lane] = id;
  for (int i = threadIdx.x; i < Chosen<kX>::kMost * kX; i += kThreads) (&chosen.source[0][0])[i] = -1;
  __syncthreads();  // every row's choices are in `ids`, and no expert has a source
  // The first of the row's own choices that is this expert, and whether an earlier row has it.
  int own = lane;
  bool is_first = id >= 0;
  if (id >= 0) {
    for (int k = lane - 1; k >= 0; --k) own = ids[m][k] == id ? k : own;
    is_first = own == lane;
    for (int row = 0; row < m; ++row)
      for (int k = 0; k < p.top_k; ++k) is_first = is_first && ids[row][k] != id;
  }
  const unsigned firsts = __ballot_sync(kAllLanes, is_first);
  if (m < kX && lane == 0) found[m] = __popc(firsts);
  __syncthreads();  // every row's count is in `found`
  int place = __popc(firsts & ((1u << lane) - 1));
  for (int row = 0; row < m && row < kX; ++row) place += found[row];
  if (is_first) chosen.expert[place] = id;
  if (threadIdx.x == 0) {
    int count = 0;
    for (int row = 0; row < kX; ++row) count += found[row];
    chosen.count = count;
  }
  __syncthreads();  // the list of experts is complete
  if (id >= 0 && own == lane) {
    int at = 0;
    while (chosen.expert[at] != id) ++at;
    float weight = 0.f;
    for (int k = lane; k < p.top_k; ++k)
      if (ids[m][k] == id) weight += __ldcg(p.expert_weights + (first_row + m) * p.top_k + k);
    chosen.weight[at][m] = weight;
    chosen.source[at][m] = lane;
  }
  __syncthreads();  // weights and sources are complete
}

template <class T, int kElems, int kX, int kPerLane>
__global__ void __launch_bounds__(kThreads, kMinBlocks) down_kernel(FusedExpertsParams p) {
  using C = Chunk<T, kElems>;
  __shared__ Chosen<kX> chosen;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int output = blockIdx.x * kWarps + warp, n = min(output, p.hidden_size - 1);
  const int first_row = blockIdx.y * kMaxX;
  allow_next_kernel();
  if constexpr (kX == 1) {
    if (warp == 0) {
      OnlyRow<T, kPerLane> row(p, lane);
      row.find(chosen), row.weigh(chosen);
    }
    __syncthreads();  // the row's choices
  } else {
    find_chosen(p, first_row, chosen);
  }

  const int chunks = p.width / kElems;
  const T* hidden = static_cast<const T*>(p.hidden) + int64_t(first_row) * p.top_k * p.width;
  // `next` is where loads are, `at` where their use is: an expert of the list and a chunk of its row, without
  // the lane.
  int next = 0, next_base = 0, at = 0, base = 0;
  typename C::Raw raw[kLoads], hidden_raw[kLoads];
  const auto load_hidden = [&](int u, int expert, int from) {
    const int chunk = from + lane;
    const bool present = expert < chosen.count && chunk < chunks;
    hidden_raw[u] =
        present ? C::load(hidden + int64_t(chosen.source[expert][0]) * p.width + int64_t(chunk) * kElems)
                : C::zero();
  };
  const auto load = [&](int u) {
    const int chunk = next_base + lane;
    const bool present = next < chosen.count && chunk < chunks;
    const T* row = nullptr;
    if constexpr (kX == 1) {
      if (present) row = down_row<T>(p, chosen, next, n);
    } else {
      if (present) row = stack_row<T>(p.down, chosen.expert[next], n);
    }
    raw[u] = present ? C::load_once(row + int64_t(chunk) * kElems) : C::zero();
  };
  const auto advance = [&](int& expert, int& from) {
    from += kWarpSize;
    if (from >= chunks) ++expert, from = 0;
  };
#pragma unroll
  for (int u = 0; u < kLoads; ++u) load(u), advance(next, next_base);
  wait_for_previous_kernel();  // for `hidden`
  drop_l1();
  if (kX == 1) {
    int expert = 0, from = 0;
#pragma unroll
    for (int u = 0; u < kLoads; ++u) load_hidden(u, expert, from), advance(expert, from);
  }

  float accumulators[kX];
#pragma unroll
  for (int m = 0; m < kX; ++m) accumulators[m] = 0.f;
#pragma unroll 1
  while (at < chosen.count) {
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      if (at < chosen.count) {
        float w[kElems];
        C::unpack(raw[u], w);
#pragma unroll
        for (int m = 0; m < kX; ++m) {
          const int source = chosen.source[at][m];
          if (source < 0) continue;  // the same in all lanes
          if (kX > 1) {
            const int chunk = base + lane;
            const T* row = hidden + (int64_t(m) * p.top_k + source) * p.width;
            hidden_raw[u] = chunk < chunks ? C::load(row + int64_t(chunk) * kElems) : C::zero();
          }
          float h[kElems], product = 0.f;
          C::unpack(hidden_raw[u], h);
#pragma unroll
          for (int e = 0; e < kElems; ++e) product = fmaf(w[e], h[e], product);
          accumulators[m] = fmaf(chosen.weight[at][m], product, accumulators[m]);
        }
      }
      advance(at, base);
      load(u);
      if (kX == 1) load_hidden(u, next, next_base);
      advance(next, next_base);
    }
  }

  std::conditional_t<sizeof(T) == 4, double, float> wide[kX];
#pragma unroll
  for (int m = 0; m < kX; ++m) wide[m] = accumulators[m];
  float sum = static_cast<float>(warp_sums<kX>(wide, lane));
  constexpr int kLanesPerRow = kWarpSize / kX;
  const int m = first_row + lane / kLanesPerRow;
  if (lane % kLanesPerRow != 0 || m >= p.rows || output >= p.hidden_size) return;
  const int64_t place = int64_t(m) * p.hidden_size + output;
  if (p.residual) sum += to_float(Chunk<T, 1>::load_l2(static_cast<const T*>(p.residual) + place));
  static_cast<T*>(p.out)[place] = from_float<T>(sum);
}

template <class T, int kElems, int kX, int kPerLane = kFewLogits>
void launch_variant(const FusedExpertsParams& p, cudaStream_t stream) {
  const dim3 block(kThreads), down_grid((p.hidden_size + kWarps - 1) / kWarps, row_groups(p));
  if constexpr (kX == 1) {
    const int features = (p.top_k + p.shared.places) * p.width, most = multiprocessor_count() * kRowBlocks;
    const dim3 grid(std::min((features + kWarps - 1) / kWarps, most));
    const size_t row_bytes = padded_chunks<kElems, kRound>(p.hidden_size) * kElems * sizeof(T);
    HF_FASTPATH_CUDA_CHECK(launch_programmatic(gate_up_row_kernel<T, kElems, kPerLane>, grid, block,
                                               row_bytes, stream, p.programmatic_launch, p));
    if constexpr (kElems > 1) {
      const DownPlan plan = down_plan(p);
      if (plan.slots > 0 && has_hopper_code()) return launch_row_down<T, kPerLane>(p, plan, stream);
    }
  } else {
    const dim3 grid = expert_grid(p, p.width, kWarps);
    HF_FASTPATH_CUDA_CHECK(launch_programmatic(gate_up_kernel<T, kElems, kX>, grid, block, size_t(0), stream,
                                               p.programmatic_launch, p));
  }
  // The kernel in front is our own: it writes nothing that is read early.
  HF_FASTPATH_CUDA_CHECK(launch_programmatic(down_kernel<T, kElems, kX, kPerLane>, down_grid, block,
                                             size_t(0), stream, true, p));
}

template <class T, int kElems>
void launch_rows(const FusedExpertsParams& p, cudaStream_t stream) {
  if (takes_row(p)) {
    const bool has_few = p.logits == nullptr || p.router.num_experts <= kFewLogits * kWarpSize;
    return has_few ? launch_variant<T, kElems, 1>(p, stream)
                   : launch_variant<T, kElems, 1, kMostRouted / kWarpSize>(p, stream);
  }
  if constexpr (kElems > 1) {  // else alignment costs more than rows that are not there
    if (p.rows <= 2) return launch_variant<T, kElems, 2>(p, stream);
    if (p.rows <= 4) return launch_variant<T, kElems, 4>(p, stream);
  }
  return launch_variant<T, kElems, kMaxX>(p, stream);
}

}  // namespace

bool takes_row(const FusedExpertsParams& p) {
  constexpr int kMostBytes = 40 * 1024;  // every device has room for them, and for all else
  return p.rows == 1 && p.hidden_size * element_size(p.dtype) <= kMostBytes;
}

void launch_fused_experts(const FusedExpertsParams& p, cudaStream_t stream) {
  with_type(p.dtype, [&](auto type) {
    using T = decltype(type);
    constexpr int kElems = kVecElems<T>;
    const bool aligned = is_aligned(p.gate_up, p.hidden_size, kElems) &&
                         is_aligned(p.down, p.width, kElems) && is_aligned(p.shared, kElems) &&
                         is_aligned16(p.x) && is_aligned16(p.hidden);
    return aligned ? launch_rows<T, kElems>(p, stream) : launch_rows<T, 1>(p, stream);
  });
}

}  // namespace hf_fastpath
