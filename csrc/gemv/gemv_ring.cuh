// What: one x row times weight rows [n, k], on Hopper, with everything around it: the norm in front, bias,
//   activation, residual, the gated pair, or rotation and append to the KV cache behind.
// Work split: one or two blocks an SM, each a range of consecutive output features (or pairs of them:
//   gate and up, the two halves of a rotation). One warp only fetches: bulk copies bring weight rows
//   into a ring of slots in shared memory, before the kernel in front is even complete, because
//   weights do not depend on it. Eight warps compute: kGroupWarps of them share a row, a lane keeps
//   its part of x in registers for the whole kernel and reads its part of every row from the ring.
//   Sums over lanes wait until several rows are done, sums over warps until all are: one barrier a
//   kernel.
// Traffic: n * k * sizeof(T) (of both weights when gated) once, plus x and the norm's weight per block out of
//   L2.
// Roofline: read bandwidth. No more than RingPlan::in_flight slots are under way at a time: a deeper queue in
//   the memory system would not be faster, and the few small reads between kernels would have to stand in it.
//   float16, a call by itself: 93 % of read bandwidth for 4096 to 32000, 86 % for 14336 to 4096, 68 % for
//   4096 to 4096, gated 92 % for 4096 to 14336 twice; a whole step of Mistral-7B 91 % (H200, 2026-11).
#pragma once

#include <type_traits>

#include "common/async.cuh"
#include "common/cuda_check.cuh"
#include "gemv/gemv_device.cuh"
#include "rope_append/rope_append.cuh"

namespace hf_fastpath {

constexpr int kRingWarps = 8;  // that compute
constexpr int kRingConsumers = kRingWarps * kWarpSize;
constexpr int kRingThreads = kRingConsumers + kWarpSize;
constexpr int kRingBlocksPerSm = 2;
constexpr int kMaxRingSlots = 32;
// Chunks a lane up to which the norm's weight fits in registers beside x.
constexpr int kMaxNormedChunks = 4;

// How a launch runs over a shape.
struct RingPlan {
  int units;      // output features, or pairs of them
  int halves;     // weight rows of a unit: 1 or 2
  int slots;      // of the ring
  int in_flight;  // slots that may be under way at a time
  bool append;    // rotate and append instead of writing the output
};

// How rows lie in the ring's slots: kChunks 16-byte chunks a lane of each row, kGroupWarps warps a row.
template <int kChunks, int kGroupWarps>
struct RingShape {
  static constexpr int kGroups = kRingWarps / kGroupWarps;
  static constexpr int kColumnBytes =
      kGroupWarps * kWarpSize * 16;       // of a row that one load of its warps covers
  static constexpr int kSlotColumns = 4;  // of all groups together: 16 KB
  static constexpr int kPieces = (kChunks + kSlotColumns - 1) / kSlotColumns;  // slots a row takes
  static constexpr int kPieceChunks = (kChunks + kPieces - 1) / kPieces;
  static constexpr int kRows = kPieces > 1                  ? 1
                               : kSlotColumns / kChunks < 4 ? (kSlotColumns / kChunks < 2 ? 1 : 2)
                                                            : 4;
  static constexpr int kSlotRows = kRows * kGroups;
  static constexpr int kSlotBytes = kSlotRows * kPieceChunks * kColumnBytes;
  static constexpr int kDeferred =
      kRows >= 4 ? 2 : 4;  // slots (or rows in pieces) whose sums are taken together
  static constexpr int kSums = kRows * kDeferred;
  static_assert(kPieces == 1 || kGroups == 1, "only rows of all warps are cut in pieces");
};

template <class T>
using RingSum =
    std::conditional_t<sizeof(T) == 4, double, float>;  // float32 results keep every bit of a lane's sum

#if HF_FASTPATH_HOPPER

// Units of this block. Two blocks of an SM are neighbors, so that SMs get the same number within one.
__device__ __forceinline__ void ring_range(const RingPlan& plan, int& begin, int& end) {
  const int per_half = (gridDim.x + 1) / 2;
  const int at = gridDim.x % 2 ? blockIdx.x : blockIdx.x % per_half * 2 + blockIdx.x / per_half;
  begin = static_cast<int>(int64_t(plan.units) * at / gridDim.x);
  end = static_cast<int>(int64_t(plan.units) * (at + 1) / gridDim.x);
}

// Output feature of one half of a unit.
__device__ __forceinline__ int ring_feature(const RopeAppendParams& rope, bool append, int unit, int half) {
  return append ? pair_feature(rope, unit, half) : unit;
}

template <class T>
__device__ __forceinline__ const T* ring_row(const GemvParams& p, const RopeAppendParams& rope,
                                             const RingPlan& plan, int unit, int half) {
  if (p.gated) return weight_row<T, true>(p, unit, half);
  return weight_row<T, false>(p, ring_feature(rope, plan.append, unit, half), 0);
}

// A position in the ring.
struct RingCursor {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance(int slots) {
    if (++slot == slots) slot = 0, parity ^= 1;
  }
};

// Fetches the rows of this block, in order.
template <class T, class Shape>
__device__ __forceinline__ void ring_fetch(const GemvParams& p, const RopeAppendParams& rope,
                                           const RingPlan& plan, uint32_t ring, uint32_t full, uint32_t empty,
                                           int lane) {
  int begin, end;
  ring_range(plan, begin, end);
  const int units = end - begin, rows = units * plan.halves;
  const int row_bytes = static_cast<int>(p.k) * static_cast<int>(sizeof(T));
  const uint64_t policy = read_once_policy();
  RingCursor at, oldest;
  int under_way = 0;
#pragma unroll 1
  for (int first = 0; first < rows; first += Shape::kSlotRows) {
    const int here = min(Shape::kSlotRows, rows - first), row = first + lane;
    const char* from = nullptr;
    if (lane < here) {
      const int half = row >= units;
      from = reinterpret_cast<const char*>(ring_row<T>(p, rope, plan, begin + row - half * units, half));
    }
#pragma unroll 1
    for (int piece = 0; piece < Shape::kPieces; ++piece) {
      constexpr int kPieceBytes = Shape::kPieceChunks * Shape::kColumnBytes;
      const int bytes = min(kPieceBytes, row_bytes - piece * kPieceBytes);
      barrier_wait(empty + 8 * at.slot, at.parity ^ 1);
      if (under_way == plan.in_flight) {
        barrier_wait(full + 8 * oldest.slot, oldest.parity);
        oldest.advance(plan.slots);
      } else {
        ++under_way;
      }
      if (lane == 0) barrier_arrive_expect(full + 8 * at.slot, here * bytes);
      __syncwarp();  // announced before anything can arrive
      if (lane < here) {
        copy_to_shared(ring + at.slot * Shape::kSlotBytes + lane * kPieceBytes, from + piece * kPieceBytes,
                       bytes, full + 8 * at.slot, policy);
      }
      at.advance(plan.slots);
    }
  }
}

// Scales this lane's part of x by the norm's weight, and by its statistics where they have to come first.
// Returns what dot products still have to be multiplied by, once every warp has passed a barrier: sums of
// squares lie in `squares`, one a warp of the first group.
template <class T, int kChunks, int kGroupWarps, int kElems>
__device__ __forceinline__ void ring_norm(const GemvNorm& norm, const uint4 (&weight)[kChunks],
                                          float (&x)[kChunks][kElems], int lane_chunk, int chunks, int k,
                                          int warp, int lane, float* scratch) {
  using C = Chunk<T, kElems>;
  float total = 0.f;
  if (norm.kind == Norm::kRms) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      float w[kElems];
      C::unpack(weight[c], w);
#pragma unroll
      for (int e = 0; e < kElems; ++e) total = fmaf(x[c][e], x[c][e], total), x[c][e] *= w[e];
    }
    total = warp_sum(total);
    if (warp < kGroupWarps && lane == 0) scratch[warp] = total;
    return;
  }
#pragma unroll
  for (int c = 0; c < kChunks; ++c)
#pragma unroll
    for (int e = 0; e < kElems; ++e) total += x[c][e];
  const auto over_group = [&](float value, float* slots) {  // every group holds all of x
    value = warp_sum(value);
    if (lane == 0) slots[warp] = value;
    sync_some(1, kRingConsumers);  // the group's other warps
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < kGroupWarps; ++w) sum += slots[warp / kGroupWarps * kGroupWarps + w];
    return sum;
  };
  const float mean = over_group(total, scratch) / k;
  total = 0.f;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const bool present = lane_chunk + c * kGroupWarps * kWarpSize < chunks;
#pragma unroll
    for (int e = 0; e < kElems; ++e) {
      x[c][e] = present ? x[c][e] - mean : 0.f;
      total = fmaf(x[c][e], x[c][e], total);
    }
  }
  const float scale = rsqrtf(over_group(total, scratch + kRingWarps) / k + norm.eps);
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int chunk = lane_chunk + c * kGroupWarps * kWarpSize;
    float w[kElems], b[kElems];
    C::unpack(weight[c], w);
    C::unpack(norm.bias && chunk < chunks
                  ? C::load_readonly(static_cast<const T*>(norm.bias) + chunk * kElems)
                  : C::zero(),
              b);
#pragma unroll
    for (int e = 0; e < kElems; ++e) x[c][e] = fmaf(x[c][e] * scale, w[e], b[e]);
  }
}

template <class T, int kChunks, int kGroupWarps>
__device__ __forceinline__ void ring_compute(const GemvParams& p, const RopeAppendParams& rope,
                                             const RingPlan& plan, const char* ring, uint32_t full,
                                             uint32_t empty, RingSum<T>* parts) {
  using Shape = RingShape<kChunks, kGroupWarps>;
  using C = Chunk<T, kVecElems<T>>;
  using Sum = RingSum<T>;
  constexpr int kElems = kVecElems<T>;
  __shared__ float scratch[2 * kRingWarps];
  const int tid = threadIdx.x, warp = tid / kWarpSize, lane = tid % kWarpSize;
  const int group = warp / kGroupWarps, lane_chunk = warp % kGroupWarps * kWarpSize + lane;
  const int chunks = static_cast<int>(p.k) / kElems;
  int begin, end;
  ring_range(plan, begin, end);
  const int units = end - begin, rows = units * plan.halves;

  // Only the last chunk of a lane may lie past the end of a row.
  const auto present = [&](int c) {
    return c < kChunks - 1 || lane_chunk + c * kGroupWarps * kWarpSize < chunks;
  };
  constexpr bool kTakesNorm = kChunks <= kMaxNormedChunks;
  uint4 norm_weight[kChunks];
  if (kTakesNorm && p.norm.kind != Norm::kNone) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const T* at =
          static_cast<const T*>(p.norm.weight) + (lane_chunk + c * kGroupWarps * kWarpSize) * kElems;
      norm_weight[c] = present(c) ? C::load_shared_line(at) : C::zero();
    }
  }

  __shared__ AppendSlots slots;
  __shared__ float all_cos[kMaxRotaryDim], all_sin[kMaxRotaryDim];
  if (plan.append) find_slots(rope, 1, slots);

  wait_for_previous_kernel();

  uint4 x_raw[kChunks];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const T* at = static_cast<const T*>(p.x) + (lane_chunk + c * kGroupWarps * kWarpSize) * kElems;
    x_raw[c] = present(c) ? C::load_l2(at) : C::zero();
  }
  // What is needed at the end is asked for now.
  static_assert(kMaxRotaryDim <= kRingConsumers, "a thread loads one angle");
  T cos = from_float<T>(1.f), sin = from_float<T>(0.f);
  if (plan.append && tid < rope.rotary_dim) {
    cos = Chunk<T, 1>::load_l2(static_cast<const T*>(rope.cos) + tid);
    sin = Chunk<T, 1>::load_l2(static_cast<const T*>(rope.sin) + tid);
  }
  Addends<T> addends[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (!p.gated && tid < units && half < plan.halves)
      addends[half] = load_addends<T>(p, 0, ring_feature(rope, plan.append, begin + tid, half));
  }
  float x[kChunks][kElems];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) C::unpack(x_raw[c], x[c]);
  if (kTakesNorm && p.norm.kind != Norm::kNone) {
    ring_norm<T, kChunks, kGroupWarps, kElems>(p.norm, norm_weight, x, lane_chunk, chunks,
                                               static_cast<int>(p.k), warp, lane, scratch);
  }

  trace(TracePoint::kReady);

  RingCursor at;
#pragma unroll 1
  for (int first = 0; first < rows; first += Shape::kSlotRows * Shape::kDeferred) {
    float acc[Shape::kSums];
#pragma unroll
    for (int i = 0; i < Shape::kSums; ++i) acc[i] = 0.f;
#pragma unroll
    for (int d = 0; d < Shape::kDeferred; ++d) {
      if (d > 0 && first + d * Shape::kSlotRows >= rows) break;
#pragma unroll
      for (int piece = 0; piece < Shape::kPieces; ++piece) {
        barrier_wait(full + 8 * at.slot, at.parity);
        const char* slot = ring + at.slot * Shape::kSlotBytes +
                           group * Shape::kRows * Shape::kPieceChunks * Shape::kColumnBytes + lane_chunk * 16;
        uint4 raw[Shape::kRows][Shape::kPieceChunks];
#pragma unroll
        for (int r = 0; r < Shape::kRows; ++r)
#pragma unroll
          for (int c = 0; c < Shape::kPieceChunks; ++c) {
            if (piece * Shape::kPieceChunks + c >= kChunks) continue;
            const char* from = slot + (r * Shape::kPieceChunks + c) * Shape::kColumnBytes;
            raw[r][c] =
                present(piece * Shape::kPieceChunks + c) ? *reinterpret_cast<const uint4*>(from) : C::zero();
          }
#pragma unroll
        for (int c = 0; c < Shape::kPieceChunks; ++c)
#pragma unroll
          for (int r = 0; r < Shape::kRows; ++r) {
            if (piece * Shape::kPieceChunks + c >= kChunks) continue;
            float w[kElems];
            C::unpack(raw[r][c], w);
#pragma unroll
            for (int e = 0; e < kElems; ++e) {
              acc[d * Shape::kRows + r] =
                  fmaf(w[e], x[piece * Shape::kPieceChunks + c][e], acc[d * Shape::kRows + r]);
            }
          }
        __syncwarp();  // every lane has its part
        if (lane == 0) barrier_arrive(empty + 8 * at.slot);
        at.advance(plan.slots);
      }
    }
    Sum sums[Shape::kSums];
#pragma unroll
    for (int i = 0; i < Shape::kSums; ++i) sums[i] = acc[i];
    const Sum sum = warp_sums<Shape::kSums>(sums, lane);
    constexpr int kLanesPerSum = kWarpSize / Shape::kSums;
    const int index = lane / kLanesPerSum;
    const int row =
        first + index / Shape::kRows * Shape::kSlotRows + group * Shape::kRows + index % Shape::kRows;
    if (lane % kLanesPerSum == 0 && row < rows) parts[row * kGroupWarps + warp % kGroupWarps] = sum;
  }
  trace(TracePoint::kSums);
  if (plan.append && tid < rope.rotary_dim) all_cos[tid] = to_float(cos), all_sin[tid] = to_float(sin);
  sync_some(1, kRingConsumers);  // every warp's part of every sum, and the angles

  trace(TracePoint::kMerged);
  float scale = 1.f;
  if (kTakesNorm && p.norm.kind == Norm::kRms) {
    float squares = 0.f;
#pragma unroll
    for (int w = 0; w < kGroupWarps; ++w) squares += scratch[w];
    scale = rsqrtf(squares / p.k + p.norm.eps);
  }
  const auto dot = [&](int row) {
    Sum sum = 0;
#pragma unroll
    for (int w = 0; w < kGroupWarps; ++w) sum += parts[row * kGroupWarps + w];
    return static_cast<float>(sum) * scale;
  };
  for (int i = tid; i < units; i += kRingConsumers) {
    const int unit = begin + i;
    if (p.gated) {
      finish_gated<T>(p, 0, unit, dot(i), dot(units + i));
      continue;
    }
    if (i != tid) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (half < plan.halves)
          addends[half] = load_addends<T>(p, 0, ring_feature(rope, plan.append, unit, half));
      }
    }
    if (plan.append) {
      const Pair pair = find_pair(rope, unit);
      float pair_cos[2], pair_sin[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        pair_cos[half] = pair.turns ? all_cos[pair.angle[half]] : 1.f;
        pair_sin[half] = pair.turns ? all_sin[pair.angle[half]] : 0.f;
      }
      store_pair<T>(rope, slots.place, slots.slots[0], 0, pair, pair_cos, pair_sin,
                    dot(i) + to_float(addends[0].bias), dot(units + i) + to_float(addends[1].bias));
    } else {
      finish<T>(p, 0, unit, dot(i), addends[0]);
    }
  }
}

#endif  // HF_FASTPATH_HOPPER

template <class T, int kChunks, int kGroupWarps>
__global__ void __launch_bounds__(kRingThreads, kRingBlocksPerSm)
    gemv_ring_kernel(const __grid_constant__ GemvParams p, const __grid_constant__ RopeAppendParams rope,
                     const __grid_constant__ RingPlan plan) {
#if HF_FASTPATH_HOPPER
  using Shape = RingShape<kChunks, kGroupWarps>;
  extern __shared__ __align__(128) char ring[];
  __shared__ __align__(8) uint64_t barriers[2][kMaxRingSlots];
  const uint32_t full = shared_address(barriers[0]), empty = shared_address(barriers[1]);
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < plan.slots; ++slot) {
      barrier_init(full + 8 * slot, 1);
      barrier_init(empty + 8 * slot, kRingWarps);
    }
    barrier_init_done();
  }
  __syncthreads();  // initialized barriers
  allow_next_kernel();
  if (threadIdx.x >= kRingConsumers) {
    ring_fetch<T, Shape>(p, rope, plan, shared_address(ring), full, empty, threadIdx.x % kWarpSize);
    return;
  }
  RingSum<T>* parts = reinterpret_cast<RingSum<T>*>(ring + plan.slots * Shape::kSlotBytes);
  ring_compute<T, kChunks, kGroupWarps>(p, rope, plan, ring, full, empty, parts);
  trace(TracePoint::kEnd);
#endif
}

}  // namespace hf_fastpath
