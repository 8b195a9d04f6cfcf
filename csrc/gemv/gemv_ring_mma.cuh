// What: gemv_ring.cuh for 2 to 8 x rows of 16-bit types, on tensor cores, with everything behind it.
// Work split: one block an SM, a range of consecutive output features (or pairs of them). One warp only
//   fetches: a slot of the ring takes up to 4 KB each of eight weight rows, under way before the kernel in
//   front is complete; shorter pieces of a row made every form of this kernel slower (docs/performance.md).
//   Eight warps compute, each a part of k: weights are the B operand; a warp keeps its part of x
//   in registers as the A operand. x that is too long for the registers comes in phases, for some tiles of
//   eight rows together. One more warp adds the warps' sums of a tile, which meet in shared memory, and
//   writes the outputs, so that those who compute never wait for what is added there. Rows of a slot are 64
//   bytes further apart than they are long, so that no read has bank conflicts.
// Traffic: n * k * sizeof(T) (of both weights when gated) once, plus m * k * sizeof(T) of x per block out of
//   L2, for long rows per kMmaGroupTiles * 8 rows of a block.
// Roofline: read bandwidth.
#pragma once

#include "common/mma.cuh"
#include "gemv/gemv_ring.cuh"

namespace hf_fastpath {

constexpr int kMmaXRows = 8;                      // at most
constexpr int kMmaTileRows = 8;                   // weight rows of a tile: the n side of a product
constexpr int kMmaGroupTiles = 4;                 // tiles that a phase of x serves before the next
constexpr int kMmaParts = 2 * kMmaGroupTiles;     // tiles whose sums lie in shared memory
constexpr int kMmaStep = 32;                      // elements of k of two products: 16 bytes a lane
constexpr int kMmaSlice = kRingWarps * kMmaStep;  // a step of every warp
constexpr int kMmaSliceBytes = 2 * kMmaSlice;
constexpr int kMmaSlotSteps = 8;  // of a slot, at most
constexpr int kMmaPhaseSlots = 2;
constexpr int kMmaPhaseSteps = kMmaPhaseSlots * kMmaSlotSteps;  // x of so many is in registers
constexpr int kMmaRowStride = kMmaSlotSteps * kMmaSliceBytes + 64,
              kMmaSlotBytes = kMmaTileRows * kMmaRowStride;
constexpr int kMmaTileSums = kMmaTileRows * kMmaXRows;
constexpr int kMmaPartBytes = kRingWarps * kMmaTileSums * int(sizeof(float));  // of a tile
constexpr int kMmaThreads = kRingThreads + kWarpSize;

struct MmaRingPlan {
  RingPlan ring;
  int phases;  // that x comes in
};

#if HF_FASTPATH_HOPPER

// Slices of k that x in registers serves.
struct MmaPhase {
  int begin, steps;  // steps: 1 to kMmaPhaseSteps

  __device__ __forceinline__ MmaPhase(const MmaRingPlan& plan, int k, int phase) {
    const int slices = k / kMmaSlice;
    begin = slices * phase / plan.phases;
    steps = slices * (phase + 1) / plan.phases - begin;
  }
  __device__ __forceinline__ int slots() const { return steps > kMmaSlotSteps ? 2 : 1; }
  // Steps in front of a slot, and of it; slots are as long as each other, within one.
  __device__ __forceinline__ int slot_begin(int slot) const { return slot * ((steps + 1) / 2); }
  __device__ __forceinline__ int slot_steps(int slot) const {
    return slots() == 1 ? steps : slot == 0 ? (steps + 1) / 2 : steps / 2;
  }
};

// What a block does: tiles of units [begin, end).
struct MmaRange {
  int begin, end, unit_shift, tiles;  // 1 << unit_shift units a tile

  __device__ __forceinline__ explicit MmaRange(const RingPlan& plan) {
    begin = static_cast<int>(int64_t(plan.units) * blockIdx.x / gridDim.x);
    end = static_cast<int>(int64_t(plan.units) * (blockIdx.x + 1) / gridDim.x);
    unit_shift = plan.halves == 1 ? 3 : 2;
    tiles = (end - begin + (1 << unit_shift) - 1) >> unit_shift;
  }
};

template <class T>
__device__ __forceinline__ void ring_mma_fetch(const GemvParams& p, const RopeAppendParams& rope,
                                               const MmaRingPlan& plan, const MmaRange& range, uint32_t ring,
                                               uint32_t full, uint32_t empty, int lane) {
  const uint64_t policy = read_once_policy();
  const int half = lane >> range.unit_shift, local = lane - (half << range.unit_shift);
  RingCursor at, oldest;
  int under_way = 0;
#pragma unroll 1
  for (int group = 0; group < range.tiles; group += kMmaGroupTiles)
#pragma unroll 1
    for (int i = 0; i < plan.phases; ++i) {
      const MmaPhase phase(plan, static_cast<int>(p.k), i);
#pragma unroll 1
      for (int tile = group; tile < min(group + kMmaGroupTiles, range.tiles); ++tile) {
        const int first = range.begin + (tile << range.unit_shift), unit = first + local;
        const bool present = lane < kMmaTileRows && unit < range.end;
        const int here = plan.ring.halves * min(1 << range.unit_shift, range.end - first);
        const char* from =
            present ? reinterpret_cast<const char*>(ring_row<T>(p, rope, plan.ring, unit, half)) : nullptr;
#pragma unroll 1
        for (int slot = 0; slot < phase.slots(); ++slot) {
          const int bytes = phase.slot_steps(slot) * kMmaSliceBytes;
          barrier_wait(empty + 8 * at.slot, at.parity ^ 1);
          if (under_way == plan.ring.in_flight) {
            barrier_wait(full + 8 * oldest.slot, oldest.parity);
            oldest.advance(plan.ring.slots);
          } else {
            ++under_way;
          }
          if (lane == 0) barrier_arrive_expect(full + 8 * at.slot, here * bytes);
          __syncwarp();  // announced before anything can arrive
          if (present) {
            copy_to_shared(ring + at.slot * kMmaSlotBytes + lane * kMmaRowStride,
                           from + (phase.begin + phase.slot_begin(slot)) * kMmaSliceBytes, bytes,
                           full + 8 * at.slot, policy);
          }
          at.advance(plan.ring.slots);
        }
      }
    }
}

// A warp's part of x in a phase, as A operands: row g, 16 bytes a step.
template <class T>
struct MmaInput {
  using C = Chunk<T, 8>;
  uint4 steps[kMmaPhaseSlots][kMmaSlotSteps];

  // Calls f(chunk, element of k) for every step there is.
  template <class F>
  __device__ __forceinline__ void each(const MmaPhase& phase, int warp, int q, F f) {
#pragma unroll
    for (int slot = 0; slot < kMmaPhaseSlots; ++slot)
#pragma unroll
      for (int i = 0; i < kMmaSlotSteps; ++i) {
        if (slot >= phase.slots() || i >= phase.slot_steps(slot)) continue;
        f(steps[slot][i], (phase.begin + phase.slot_begin(slot) + i) * kMmaSlice + warp * kMmaStep + q * 8);
      }
  }

  __device__ __forceinline__ void load(const GemvParams& p, const MmaPhase& phase, int warp, int g, int q) {
    const T* row = static_cast<const T*>(p.x) + g * p.k;
#pragma unroll
    for (int slot = 0; slot < kMmaPhaseSlots; ++slot)
#pragma unroll
      for (int i = 0; i < kMmaSlotSteps; ++i) steps[slot][i] = C::zero();
    each(phase, warp, q, [&](uint4& x, int k) { x = g < p.m ? C::load_l2(row + k) : C::zero(); });
  }
};

template <class T>
__device__ __forceinline__ void ring_mma_compute(const GemvParams& p, const MmaRingPlan& plan,
                                                 const MmaRange& range, const char* ring, char* parts,
                                                 uint32_t full, uint32_t empty, uint32_t summed,
                                                 uint32_t written) {
  const int tid = threadIdx.x, warp = tid / kWarpSize, lane = tid % kWarpSize;
  const int g = lane / 4, q = lane % 4;  // as in common/mma.cuh
  MmaPhase phase(plan, static_cast<int>(p.k), 0);
  wait_for_previous_kernel();
  MmaInput<T> x;
  x.load(p, phase, warp, g, q);
  trace(TracePoint::kReady);

  constexpr int kAtOnce = 8;  // loads of weights in flight
  RingCursor at, part;
#pragma unroll 1
  for (int group = 0; group < range.tiles; group += kMmaGroupTiles) {
    const int tiles = min(kMmaGroupTiles, range.tiles - group);
    const RingCursor group_part = part;
#pragma unroll 1
    for (int i = 0; i < plan.phases; ++i) {
      if (plan.phases > 1) {
        phase = MmaPhase(plan, static_cast<int>(p.k), i);
        if (group + i > 0) x.load(p, phase, warp, g, q);
      }
      part = group_part;
#pragma unroll 1
      for (int tile = 0; tile < tiles; ++tile) {
        float c[4][4] = {};  // of every fourth product: x row g, weight rows 2 q and the next
#pragma unroll
        for (int slot = 0; slot < kMmaPhaseSlots; ++slot) {
          if (slot >= phase.slots()) break;
          const char* weights =
              ring + at.slot * kMmaSlotBytes + g * kMmaRowStride + warp * (kMmaStep * 2) + q * 16;
          const int steps = phase.slot_steps(slot);
          barrier_wait(full + 8 * at.slot, at.parity);
#pragma unroll
          for (int first = 0; first < kMmaSlotSteps; first += kAtOnce) {
            uint4 w[kAtOnce];
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
              w[j] = first + j < steps
                         ? *reinterpret_cast<const uint4*>(weights + (first + j) * kMmaSliceBytes)
                         : make_uint4(0, 0, 0, 0);
            }
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
              const uint4 a = x.steps[slot][first + j];
              mma<T>(c[j % 2 * 2], a.x, 0u, a.y, 0u, w[j].x, w[j].y);
              mma<T>(c[j % 2 * 2 + 1], a.z, 0u, a.w, 0u, w[j].z, w[j].w);
            }
          }
          __syncwarp();  // every lane has its part
          if (lane == 0) barrier_arrive(empty + 8 * at.slot);
          at.advance(plan.ring.slots);
        }
        float* even = reinterpret_cast<float*>(parts + part.slot * kMmaPartBytes) +
                      (warp * kMmaTileRows + 2 * q) * kMmaXRows + g;
        float* odd = even + kMmaXRows;
        const float first = c[0][0] + c[1][0] + (c[2][0] + c[3][0]);
        const float second = c[0][1] + c[1][1] + (c[2][1] + c[3][1]);
        if (i == 0) barrier_wait(written + 8 * part.slot, part.parity ^ 1);
        *even = i == 0 ? first : *even + first;
        *odd = i == 0 ? second : *odd + second;
        if (i == plan.phases - 1) {
          barrier_arrive(summed + 8 * part.slot);
        }
        part.advance(kMmaParts);
      }
    }
  }
}

// Writes the outputs of one tile after the other, by one warp: unit first + i / kMmaXRows of x row i %
// kMmaXRows, for i of lane and lane + 32.
template <class T>
__device__ __forceinline__ void ring_mma_write(const GemvParams& p, const RopeAppendParams& rope,
                                               const MmaRingPlan& plan, const MmaRange& range,
                                               const char* parts, uint32_t summed, uint32_t written,
                                               int lane) {
  constexpr int kOutputs = kMmaTileSums / kWarpSize;
  const bool append = plan.ring.append;
  const int m = lane % kMmaXRows;
  CachePlace place{};
  int64_t slot = 0;  // of this lane's x row
  if (append) {
    place = cache_place(rope);
    if (m < p.m) slot = cache_slot(rope, place.capacity, m);
  }
  wait_for_previous_kernel();
  RingCursor part;
#pragma unroll 1
  for (int tile = 0; tile < range.tiles; ++tile) {
    // What is added at the end is asked for now.
    Addends<T> addends[kOutputs][2];
    Pair pairs[kOutputs];
    T cos[kOutputs][2], sin[kOutputs][2];
    const auto unit_of = [&](int o) {
      return range.begin + (tile << range.unit_shift) + lane / kMmaXRows + o * (kWarpSize / kMmaXRows);
    };
    const auto is_there = [&](int o) {
      return lane / kMmaXRows + o * (kWarpSize / kMmaXRows) < 1 << range.unit_shift &&
             unit_of(o) < range.end && m < p.m;
    };
#pragma unroll
    for (int o = 0; o < kOutputs; ++o) {
      if (!is_there(o) || p.gated) continue;
      const int unit = unit_of(o);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (half < plan.ring.halves)
          addends[o][half] = load_addends<T>(p, m, ring_feature(rope, append, unit, half));
      }
      if (!append) continue;
      pairs[o] = find_pair(rope, unit);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (!pairs[o].turns) continue;
        cos[o][half] = Chunk<T, 1>::load_l2(token_angles<T>(rope, rope.cos, m) + pairs[o].element[half]);
        sin[o][half] = Chunk<T, 1>::load_l2(token_angles<T>(rope, rope.sin, m) + pairs[o].element[half]);
      }
    }
    barrier_wait(summed + 8 * part.slot, part.parity);
    const float* sums = reinterpret_cast<const float*>(parts + part.slot * kMmaPartBytes);
    float dots[kOutputs][2];
#pragma unroll
    for (int o = 0; o < kOutputs; ++o)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        dots[o][half] = 0.f;
        if (half >= plan.ring.halves || !is_there(o)) continue;
        const int row = (half << range.unit_shift) + lane / kMmaXRows + o * (kWarpSize / kMmaXRows);
#pragma unroll
        for (int w = 0; w < kRingWarps; ++w) dots[o][half] += sums[(w * kMmaTileRows + row) * kMmaXRows + m];
      }
    barrier_arrive(written + 8 * part.slot);
    part.advance(kMmaParts);
#pragma unroll
    for (int o = 0; o < kOutputs; ++o) {
      if (!is_there(o)) continue;
      if (p.gated) {
        finish_gated<T>(p, m, unit_of(o), dots[o][0], dots[o][1]);
      } else if (append) {
        float pair_cos[2], pair_sin[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          pair_cos[half] = pairs[o].turns ? to_float(cos[o][half]) : 1.f;
          pair_sin[half] = pairs[o].turns ? to_float(sin[o][half]) : 0.f;
        }
        store_pair<T>(rope, place, slot, m, pairs[o], pair_cos, pair_sin,
                      dots[o][0] + to_float(addends[o][0].bias), dots[o][1] + to_float(addends[o][1].bias));
      } else {
        finish<T>(p, m, unit_of(o), dots[o][0], addends[o][0]);
      }
    }
    __syncwarp();
  }
}

#endif  // HF_FASTPATH_HOPPER

template <class T>
__global__ void __launch_bounds__(kMmaThreads, 1)
    gemv_ring_mma_kernel(const __grid_constant__ GemvParams p, const __grid_constant__ RopeAppendParams rope,
                         const __grid_constant__ MmaRingPlan plan) {
#if HF_FASTPATH_HOPPER
  extern __shared__ __align__(128) char ring[];
  __shared__ __align__(8) uint64_t barriers[2][kMaxRingSlots];
  __shared__ __align__(8) uint64_t part_barriers[2][kMmaParts];
  const uint32_t full = shared_address(barriers[0]), empty = shared_address(barriers[1]);
  const uint32_t summed = shared_address(part_barriers[0]), written = shared_address(part_barriers[1]);
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < plan.ring.slots; ++slot) {
      barrier_init(full + 8 * slot, 1);
      barrier_init(empty + 8 * slot, kRingWarps);
    }
    for (int part = 0; part < kMmaParts; ++part) {
      barrier_init(summed + 8 * part, kRingConsumers);
      barrier_init(written + 8 * part, kWarpSize);
    }
    barrier_init_done();
  }
  __syncthreads();  // initialized barriers
  allow_next_kernel();
  const MmaRange range(plan.ring);
  const int lane = threadIdx.x % kWarpSize;
  char* parts = ring + plan.ring.slots * kMmaSlotBytes;
  if (threadIdx.x >= kRingThreads) {
    return ring_mma_write<T>(p, rope, plan, range, parts, summed, written, lane);
  }
  if (threadIdx.x >= kRingConsumers) {
    return ring_mma_fetch<T>(p, rope, plan, range, shared_address(ring), full, empty, lane);
  }
  ring_mma_compute<T>(p, plan, range, ring, parts, full, empty, summed, written);
  trace(TracePoint::kEnd);
#endif
}

}  // namespace hf_fastpath
