// What: one x row times weight rows [n, k], on Hopper, with everything around it: the norm in front, bias,
//   activation, residual, the gated pair, or rotation and append to the KV cache behind.
// Work split: one or two blocks an SM, each a range of consecutive output features (or pairs of them: gate
// and
//   up, the two halves of a rotation). One warp only fetches: bulk copies bring weight rows into a ring of
//   slots in shared memory, before the kernel in front is even complete, because weights do not depend on
//   it. Eight warps compute: kGroupWarps of them share a row, a lane keeps its part of x in registers for
//   the whole kernel and reads its part of every row from the ring. Sums over lanes wait until several rows
//   are done, sums over warps until all are: one barrier a kernel.
// Traffic: n * k * sizeof(T) (of both weights when gated) once, plus x and the norm's weight per block out of
//   L2.
// Roofline: read bandwidth. While the ring is filled, no more than RingPlan::in_flight slots are under way at
// a
//   time: a deeper queue in the memory system would not be faster, and the few small reads between kernels
//   would have to stand in it. Few registers let blocks of several kernels be on an SM at once.
//   float16, a call by itself: 93 % of read bandwidth for 4096 to 32000, 86 % for 14336 to 4096, 68 % for
//   4096 to 4096, gated 92 % for 4096 to 14336 twice; a whole step of Mistral-7B 93 % (H200, 2026-11).
#pragma once

#include <type_traits>

#include "common/async.cuh"
#include "common/cuda_check.cuh"
#include "common/mma.cuh"
#include "gemv/gemv_ring_end.cuh"

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
  int share;      // units of a block,
  int larger;     // of which this many have one more
  int halves;     // weight rows of a unit: 1 or 2
  int slots;      // of the ring
  int in_flight;  // slots that may be under way at a time until the ring has been filled once
  int streaming;  // and from then on
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
  static_assert(kPieces == 1 || kGroups == 1, "only rows of all warps are cut in pieces");
};

template <class T>
using RingSum =
    std::conditional_t<sizeof(T) == 4, double, float>;  // float32 results keep every bit of a lane's sum

// 16-bit products run on tensor cores: a warp's chunks of x, as loaded, are rows of A, its chunks of a weight
// row columns of B (common/mma.cuh), and the diagonal of C has the sums of lanes 4 g to 4 g + 3 in element g.
template <class T>
constexpr bool kRingMma = sizeof(T) == 2;

// Both halves of a chunk of x would have to lie in an A of its own, twice the registers of x. From five
// chunks on they are rows g and g + 8 of one A, and a second C takes the products with rows g + 8.
template <class T, int kChunks>
constexpr bool kRingTwoSums = kRingMma<T> && kChunks > 4;

// Slots (or rows in pieces) whose sums over lanes are taken together. On tensor cores a sum takes four
// registers.
template <class T, class Shape>
constexpr int kRingDeferred = kRingMma<T> || Shape::kRows >= 4 ? 2 : 4;

// Blocks whose registers an SM has room for, those of other kernels counted: the fewer a block has, the more
// kernels start early. An append has too much to keep.
template <class T, int kChunks, RingEnd kEnd>
constexpr int kRingMinBlocks =
    kRingMma<T> && kEnd != RingEnd::kAppend && (kChunks <= 2 || kRingTwoSums<T, kChunks>) ? 3 : 2;

#if HF_FASTPATH_HOPPER

// Units of this block. Two blocks of an SM are neighbors, so that SMs get the same number within one.
__device__ __forceinline__ void ring_range(const RingPlan& plan, int& begin, int& end) {
  const int block = blockIdx.x, blocks = gridDim.x, half = blocks / 2;
  const int at = blocks % 2 ? block : block < half ? 2 * block : 2 * (block - half) + 1;
  begin = at * plan.share + min(at, plan.larger);
  end = begin + plan.share + (at < plan.larger);
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
  int under_way = 0, fetched = 0;
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
      if (fetched >= plan.slots) barrier_wait(empty + 8 * at.slot, at.parity ^ 1);
      if (under_way >= (fetched < plan.slots ? plan.in_flight : plan.streaming)) {
        barrier_wait(full + 8 * oldest.slot, oldest.parity);
        oldest.advance(plan.slots);
      } else {
        ++under_way;
      }
      ++fetched;
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

// Multiplies this warp's part of x by the norm's weight, rounded once, and by a power of two that keeps
// float16 from overflowing. Returns what products have to be multiplied by to undo the latter.
template <class T, int kChunks>
__device__ __forceinline__ float ring_times_weight(uint4 (&x)[kChunks], const uint4 (&weight)[kChunks]) {
  using Two = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  const auto words = [](auto& chunk) { return reinterpret_cast<Two*>(&chunk); };
  float undo = 1.f;
  if constexpr (std::is_same_v<T, __half>) {
    __half2 largest = __half2half2(__ushort_as_half(0));
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
#pragma unroll
      for (int w = 0; w < 4; ++w) largest = __hmax2(largest, __habs2(words(x[c])[w]));
    const unsigned bits = __half_as_ushort(__hmax(__low2half(largest), __high2half(largest)));
    // The largest comes to lie from 8 to 16; factors of more than 2^15 are no float16.
    const int exponent = min(15, 18 - static_cast<int>(__reduce_max_sync(kAllLanes, bits) >> 10));
    const __half2 factor = __half2half2(__ushort_as_half(static_cast<unsigned short>((15 + exponent) << 10)));
    undo = __uint_as_float((127 - exponent) << 23);
#pragma unroll
    for (int c = 0; c < kChunks; ++c)
#pragma unroll
      for (int w = 0; w < 4; ++w) words(x[c])[w] = __hmul2(words(x[c])[w], factor);
  }
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    uint4 scale = weight[c];
#pragma unroll
    for (int w = 0; w < 4; ++w) words(x[c])[w] = __hmul2(words(x[c])[w], words(scale)[w]);
  }
  return undo;
}

// Layer norm of x, of which every group of warps holds all. `scratch`: two floats a warp.
template <class T, int kChunks, int kGroupWarps, int kElems>
__device__ __forceinline__ void ring_layer_norm(const GemvNorm& norm, const uint4 (&weight)[kChunks],
                                                float (&x)[kChunks][kElems], int lane_chunk, int chunks,
                                                int k, int warp, int lane, float* scratch) {
  using C = Chunk<T, kElems>;
  const auto over_group = [&](float value, float* slots) {
    value = warp_sum(value);
    if (lane == 0) slots[warp] = value;
    sync_some(1, kRingConsumers);  // the group's other warps
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < kGroupWarps; ++w) sum += slots[warp / kGroupWarps * kGroupWarps + w];
    return sum;
  };
  float total = 0.f;
#pragma unroll
  for (int c = 0; c < kChunks; ++c)
#pragma unroll
    for (int e = 0; e < kElems; ++e) total += x[c][e];
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

template <class T, int kChunks, int kGroupWarps, RingEnd kEnd>
__device__ __forceinline__ void ring_compute(const GemvParams& p, const RopeAppendParams& rope,
                                             const RingPlan& plan, const char* ring, uint32_t full,
                                             uint32_t empty, RingSum<T>* parts) {
  using Shape = RingShape<kChunks, kGroupWarps>;
  using C = Chunk<T, kVecElems<T>>;
  using Sum = RingSum<T>;
  constexpr int kElems = kVecElems<T>, kHalves = kEnd == RingEnd::kPlain ? 1 : 2;
  constexpr bool kMma = kRingMma<T>, kTwoSums = kRingTwoSums<T, kChunks>;
  constexpr int kDeferred = kRingDeferred<T, Shape>, kSums = Shape::kRows * kDeferred;
  __shared__ float scratch[2 * kRingWarps];
  const int tid = threadIdx.x, warp = tid / kWarpSize, lane = tid % kWarpSize;
  const int group = warp / kGroupWarps, lane_chunk = warp % kGroupWarps * kWarpSize + lane;
  const int chunks = static_cast<int>(p.k) / kElems;
  int begin, end;
  ring_range(plan, begin, end);
  const int units = end - begin, rows = units * kHalves;

  // Only the last chunk of a lane may lie past the end of a row.
  const auto present = [&](int c) {
    return c < kChunks - 1 || lane_chunk + c * kGroupWarps * kWarpSize < chunks;
  };
  const auto element = [&](int c) { return (lane_chunk + c * kGroupWarps * kWarpSize) * kElems; };
  constexpr bool kTakesNorm = kChunks <= kMaxNormedChunks;
  const Norm norm = kTakesNorm ? p.norm.kind : Norm::kNone;
  uint4 norm_weight[kChunks];
  if (norm != Norm::kNone) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      norm_weight[c] =
          present(c) ? C::load_shared_line(static_cast<const T*>(p.norm.weight) + element(c)) : C::zero();
    }
  }
  RingUnit<T, kEnd> mine;
  if (tid < units) mine.prepare(p, rope, begin + tid);
  sync_some(2, kRingThreads);  // initialized barriers

  wait_for_previous_kernel();

  if (tid < units) mine.load(rope);  // first: code that branches waits for what was loaded before it
  uint4 x[kChunks];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    x[c] = present(c) ? C::load_l2(static_cast<const T*>(p.x) + element(c)) : C::zero();
  }

  // Of this lane's part of x, for an RMS norm.
  const auto sum_of_squares = [&](const uint4(&from)[kChunks]) {
    float total = 0.f;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      float values[kElems];
      C::unpack(from[c], values);
#pragma unroll
      for (int e = 0; e < kElems; ++e) total = fmaf(values[e], values[e], total);
    }
    return total;
  };
  float values[kMma ? 1 : kChunks][kElems];  // x in float32
  float undo = 1.f, squares = 0.f;           // squares: of this lane's part of x
  if constexpr (!kMma) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) C::unpack(x[c], values[c]);
  }
  if (norm == Norm::kRms) {
    squares = sum_of_squares(x);
    if constexpr (kMma) {
      undo = ring_times_weight<T>(x, norm_weight);
    } else {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        float w[kElems];
        C::unpack(norm_weight[c], w);
#pragma unroll
        for (int e = 0; e < kElems; ++e) values[c][e] *= w[e];
      }
    }
  } else if (norm == Norm::kLayer) {
    if constexpr (kMma) {
      float normed[kChunks][kElems];
#pragma unroll
      for (int c = 0; c < kChunks; ++c) C::unpack(x[c], normed[c]);
      ring_layer_norm<T, kChunks, kGroupWarps>(p.norm, norm_weight, normed, lane_chunk, chunks,
                                               static_cast<int>(p.k), warp, lane, scratch);
#pragma unroll
      for (int c = 0; c < kChunks; ++c) x[c] = C::pack(normed[c]);
    } else {
      ring_layer_norm<T, kChunks, kGroupWarps>(p.norm, norm_weight, values, lane_chunk, chunks,
                                               static_cast<int>(p.k), warp, lane, scratch);
    }
  }

  trace(TracePoint::kReady);

  RingCursor at;
#pragma unroll 1
  for (int first = 0; first < rows; first += Shape::kSlotRows * kDeferred) {
    float acc[kSums][kMma ? 4 : 1] = {}, acc_high[kTwoSums ? kSums : 1][4] = {};
#pragma unroll
    for (int d = 0; d < kDeferred; ++d) {
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
            const int chunk = piece * Shape::kPieceChunks + c;
            if (chunk >= kChunks) continue;
            auto& sum = acc[d * Shape::kRows + r];
            const uint4 w = raw[r][c];
            if constexpr (kTwoSums) {
              const uint4 a = x[chunk];
              mma<T>(sum, a.x, a.z, a.y, a.w, w.x, w.y);
              mma<T>(acc_high[d * Shape::kRows + r], a.x, a.z, a.y, a.w, w.z, w.w);
            } else if constexpr (kMma) {
              mma<T>(sum, x[chunk].x, 0u, x[chunk].y, 0u, w.x, w.y);
              mma<T>(sum, x[chunk].z, 0u, x[chunk].w, 0u, w.z, w.w);
            } else {
              float weights[kElems];
              C::unpack(w, weights);
#pragma unroll
              for (int e = 0; e < kElems; ++e) sum[0] = fmaf(weights[e], values[chunk][e], sum[0]);
            }
          }
        __syncwarp();  // every lane has its part
        if (lane == 0) barrier_arrive(empty + 8 * at.slot);
        at.advance(plan.slots);
      }
    }
    Sum sums[kSums];
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      if constexpr (kMma) {  // element g of the diagonal: lane 4 g + g / 2, of its two columns that of g's
                             // parity
        float diagonal = lane & 4 ? acc[i][1] : acc[i][0];
        if constexpr (kTwoSums) diagonal += lane & 4 ? acc_high[i][3] : acc_high[i][2];
        sums[i] = lane % 4 == lane / 8 ? diagonal : 0.f;
      } else {
        sums[i] = acc[i][0];
      }
    }
    const Sum sum = warp_sums<kSums>(sums, lane) * undo;
    constexpr int kLanesPerSum = kWarpSize / kSums;
    const int index = lane / kLanesPerSum;
    const int row =
        first + index / Shape::kRows * Shape::kSlotRows + group * Shape::kRows + index % Shape::kRows;
    if (lane % kLanesPerSum == 0 && row < rows) parts[row * kGroupWarps + warp % kGroupWarps] = sum;
    if (first == 0 && norm == Norm::kRms) {  // weights of the next rows arrive meanwhile
      const float total = warp_sum(squares);
      if (lane == 0 && warp < kGroupWarps) scratch[warp] = total;
    }
  }
  trace(TracePoint::kSums);
  sync_some(1, kRingConsumers);  // every warp's part of every sum
  trace(TracePoint::kMerged);

  if (tid >= units) return;
  float scale = 1.f;
  if (norm == Norm::kRms) {
    float total = 0.f;
#pragma unroll
    for (int w = 0; w < kGroupWarps; ++w) total += scratch[w];
    scale = rsqrtf(total / p.k + p.norm.eps);
  }
  const auto store = [&](const RingUnit<T, kEnd>& unit, int i) {
    float dots[kHalves];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      Sum sum = 0;
#pragma unroll
      for (int w = 0; w < kGroupWarps; ++w) sum += parts[(half * units + i) * kGroupWarps + w];
      dots[half] = static_cast<float>(sum) * scale;
    }
    unit.store(p, rope, dots);
  };
  store(mine, tid);
#pragma unroll 1
  for (int i = tid + kRingConsumers; i < units; i += kRingConsumers) {
    mine.prepare(p, rope, begin + i);
    mine.load(rope);
    store(mine, i);
  }
}

#endif  // HF_FASTPATH_HOPPER

template <class T, int kChunks, int kGroupWarps, RingEnd kEnd>
__global__ void __launch_bounds__(kRingThreads, kRingMinBlocks<T, kChunks, kEnd>)
    gemv_ring_kernel(const __grid_constant__ GemvParams p, const __grid_constant__ RopeAppendParams rope,
                     const __grid_constant__ RingPlan plan) {
#if HF_FASTPATH_HOPPER
  using Shape = RingShape<kChunks, kGroupWarps>;
  extern __shared__ __align__(128) char ring[];
  __shared__ __align__(8) uint64_t barriers[2][kMaxRingSlots];
  const uint32_t full = shared_address(barriers[0]), empty = shared_address(barriers[1]);
  allow_next_kernel();
  if (threadIdx.x >= kRingConsumers) {
    const int lane = threadIdx.x % kWarpSize;
    if (lane < plan.slots) {
      barrier_init(full + 8 * lane, 1);
      barrier_init(empty + 8 * lane, kRingWarps);
      barrier_init_done();
    }
    __syncwarp();
    arrive_some(2, kRingThreads);  // initialized barriers: this warp waits for nobody
    ring_fetch<T, Shape>(p, rope, plan, shared_address(ring), full, empty, lane);
    return;
  }
  RingSum<T>* parts = reinterpret_cast<RingSum<T>*>(ring + plan.slots * Shape::kSlotBytes);
  ring_compute<T, kChunks, kGroupWarps, kEnd>(p, rope, plan, ring, full, empty, parts);
  trace(TracePoint::kEnd);
#endif
}

}  // namespace hf_fastpath
