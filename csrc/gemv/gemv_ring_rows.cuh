// What: gemv_ring.cuh for 2 to 8 x rows of 16-bit types.
// Work split: as there, all eight warps on every weight row. x, in registers, is the A operand: its sixteen
//   rows are kXRows rows of x times kGroups pieces of k; the eight columns of B are kTogether weight rows
//   times the same pieces, so that no product has a row of zeros. What counts of C has the same piece of k
//   on both sides, and is summed over pieces. x that is too long for the registers comes in phases: the block
//   takes a part of all of its weight rows before the next part.
// Traffic: n * k * sizeof(T) (of both weights when gated) once, plus m * k * sizeof(T) of x per block out of
//   L2.
// Roofline: read bandwidth.
#pragma once

#include "common/inverse_root.cuh"
#include "gemv/gemv_ring.cuh"

namespace hf_fastpath {

constexpr int kMaxRingXRows = 8;

// How x rows share products.
template <int kChunks, int kXRows>
struct RowsShape : RingShape<kChunks, kRingWarps> {
  static constexpr int kGroups = 16 / kXRows;         // pieces of k in a product
  static constexpr int kTogether = kXRows / 2;        // weight rows in a product
  static constexpr int kLoads = kChunks * kTogether;  // 16-byte loads a lane, to take kTogether rows
  static constexpr int kRounds = RingShape<kChunks, kRingWarps>::kRows / kTogether;  // of such rows in a slot
  static_assert(kRounds >= 1 && RingShape<kChunks, kRingWarps>::kPieces == 1, "a slot has whole rows");
};

// Blocks whose registers an SM has room for.
template <int kChunks, int kXRows, RingEnd kEnd>
constexpr int kRowsMinBlocks = kXRows == 8 || (kChunks * kXRows == 8 && kEnd != RingEnd::kGated) ? 2 : 3;

template <class T, int kChunks, int kXRows, RingEnd kEnd>
__device__ __forceinline__ void ring_rows_compute(const GemvParams& p, const RopeAppendParams& rope,
                                                  const RingPlan& plan, char* ring, RingBarriers barriers,
                                                  float* partials) {
  using Shape = RowsShape<kChunks, kXRows>;
  using C = Chunk<T, kVecElems<T>>;
  constexpr int kElems = kVecElems<T>, kHalves = kEnd == RingEnd::kPlain ? 1 : 2;
  constexpr int kGroups = Shape::kGroups, kTogether = Shape::kTogether, kLoads = Shape::kLoads;
  __shared__ __align__(16) float scratch[kXRows * kRingWarps];
  const int tid = threadIdx.x, warp = tid / kWarpSize, lane = tid % kWarpSize;
  const int g = lane / 4, q = lane % 4;  // as in common/mma.cuh
  const int chunks = static_cast<int>(p.k) / kElems;
  int begin, end;
  ring_range(plan, begin, end);
  const int units = end - begin, rows = units * kHalves, outputs = units * p.m;

  // This lane's chunk of a row in load i of a phase.
  const int lane_chunk = warp * (kTogether * kGroups * 4) + g % kGroups * 4 + q;
  const auto chunk_of = [&](int phase, int i) {
    return (phase * kChunks + i / kTogether) * kRingConsumers + lane_chunk + i % kTogether * (kGroups * 4);
  };

  const auto each_row = [&](auto f) {
#pragma unroll
    for (int round = 0; round < Shape::kRounds; ++round) f(round * kTogether + g / kGroups);
  };
  const auto offset_of = [&](int i) {
    return i / kTogether * Shape::kColumnBytes + lane_chunk * 16 + i % kTogether * (kGroups * 64);
  };
  const auto each_offset = [&](auto f) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) f(offset_of(i));
  };
  auto reader = ring_reader<T, Shape>(p, rope, plan, ring, barriers, each_row, each_offset);
  reader.start();

  const NormKind norm = p.norm.kind;
  const auto norm_weight_at = [&](int chunk) {
    return static_cast<const T*>(p.norm.weight) + chunk * kElems;
  };
  if (norm == NormKind::kRms) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (chunk_of(0, i) < chunks) prefetch_l2(norm_weight_at(chunk_of(0, i)));
    }
  }
  // Output i of the block is of row i % p.m of x, so that neighbors lie together in `partials`.
  RingUnit<T, kEnd> mine;
  const auto prepare = [&](int i) { mine.prepare(p, rope, begin + i / p.m, i % p.m); };
  if (tid < outputs) prepare(tid);
  barriers.wait_until_ready();

  wait_for_previous_kernel();

  if (tid < outputs) mine.load(p, rope);
  // Rows g / kGroups of x and kXRows / 2 further on: rows g and g + 8 of A.
  uint4 x[2][kLoads];
  const bool upper = g & 1;  // this lane ends up with sums of the second of them,
  float undo = 1.f;          // to be multiplied by this
  float squares[2] = {};     // of this lane's parts of both
  const auto load_x = [&](int phase) {
    uint4 norm_weight[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int chunk = chunk_of(phase, i);
      norm_weight[i] =
          norm == NormKind::kRms && chunk < chunks ? C::load_shared_line(norm_weight_at(chunk)) : C::zero();
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int m = half * (kXRows / 2) + g / kGroups, chunk = chunk_of(phase, i);
        x[half][i] = m < p.m && chunk < chunks
                         ? C::load_l2(static_cast<const T*>(p.x) + m * p.k + chunk * kElems)
                         : C::zero();
      }
    if (norm != NormKind::kRms) return;
    squares[0] = ring_sum_of_squares<T>(x[0]), squares[1] = ring_sum_of_squares<T>(x[1]);
    if constexpr (std::is_same_v<T, __half>) {
      __half2 largest = __halves2half2(largest_of(x[0]), largest_of(x[1]));
#pragma unroll
      for (int bit = 1; bit < 4 * kGroups; bit *= 2)
        largest = __hmax2(largest, __shfl_xor_sync(kAllLanes, largest, bit));
      const float undo_first = make_room(x[0], __half_as_ushort(__low2half(largest)));
      const float undo_second = make_room(x[1], __half_as_ushort(__high2half(largest)));
      undo = upper ? undo_second : undo_first;
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      multiply_chunk<T>(x[0][i], norm_weight[i]);
      multiply_chunk<T>(x[1][i], norm_weight[i]);
    }
  };

  const int sum_m = upper * (kXRows / 2) + g / kGroups;  // the row of x whose sums this lane ends up with
#pragma unroll 1
  for (int phase = 0; phase < plan.phases; ++phase) {
    load_x(phase);
    if (phase == 0) trace(TracePoint::kReady);
#pragma unroll 1
    for (int first = 0; first < rows; first += Shape::kSlotRows) {
      const char* weights = reader.wait() + g / kGroups * Shape::kPieceBytes;
      // Every second product of a round has these: rows g and g + 8 of A, columns 2 q and the next of B.
      float acc[Shape::kRounds][2][4] = {};
#pragma unroll
      for (int i = 0; i < kLoads; ++i)
#pragma unroll
        for (int round = 0; round < Shape::kRounds; ++round) {
          const char* from = weights + round * (kTogether * Shape::kPieceBytes) + offset_of(i);
          const uint4 w = chunk_of(phase, i) < chunks ? *reinterpret_cast<const uint4*>(from) : C::zero();
          mma<T>(acc[round][0], x[0][i].x, x[1][i].x, x[0][i].y, x[1][i].y, w.x, w.y);
          mma<T>(acc[round][1], x[0][i].z, x[1][i].z, x[0][i].w, x[1][i].w, w.z, w.w);
        }
      uint32_t bits = 0;
#pragma unroll
      for (int round = 0; round < Shape::kRounds; ++round) bits ^= __float_as_uint(acc[round][0][0]);
      reader.release(bits);
#pragma unroll
      for (int round = 0; round < Shape::kRounds; ++round) {
        // Column 2 q or the next has the same piece of k as row g, or neither has.
        const auto& c = acc[round];
        const bool counts = q % (kGroups / 2) == g % kGroups / 2;
        const float of_first = upper ? c[0][1] + c[1][1] : c[0][0] + c[1][0];
        const float of_second = upper ? c[0][3] + c[1][3] : c[0][2] + c[1][2];
        float sum = counts ? (upper ? of_second : of_first) : 0.f;
        sum += __shfl_xor_sync(kAllLanes, counts ? (upper ? of_first : of_second) : 0.f, 4);
#pragma unroll
        for (int bit = 1; bit < kGroups / 2; bit *= 2) {
          sum += __shfl_xor_sync(kAllLanes, sum, bit);
          sum += __shfl_xor_sync(kAllLanes, sum, 8 * bit);
        }
        const int row = first + round * kTogether + q / (kGroups / 2);
        if (q % (kGroups / 2) == 0 && g % kGroups < 2 && row < rows) {
          float* partial = partials + (row * kXRows + sum_m) * kRingWarps + warp;
          *partial = phase == 0 ? sum * undo : *partial + sum * undo;
        }
      }
      if (first == 0 && norm == NormKind::kRms) {  // weights of the next rows arrive meanwhile
        float sum = upper ? squares[1] : squares[0];
        sum += __shfl_xor_sync(kAllLanes, upper ? squares[0] : squares[1], 4);
        sum += __shfl_xor_sync(kAllLanes, sum, 1);
        sum += __shfl_xor_sync(kAllLanes, sum, 2);
#pragma unroll
        for (int bit = 1; bit < kGroups / 2; bit *= 2) sum += __shfl_xor_sync(kAllLanes, sum, 8 * bit);
        float* to = scratch + sum_m * kRingWarps + warp;
        if (q == 0 && g % kGroups < 2) *to = phase == 0 ? sum : *to + sum;
      }
    }
  }
  trace(TracePoint::kSums);
  sync_some(1, kRingConsumers);  // every warp's part of every sum
  trace(TracePoint::kMerged);

#pragma unroll 1
  for (int i = tid; i < outputs; i += kRingConsumers) {
    if (i != tid) {
      prepare(i);
      mine.load(p, rope);
    }
    const int unit = i / p.m, m = i % p.m;
    const float scale = norm == NormKind::kRms
                            ? inverse_root<T>(sum_of<kRingWarps>(scratch + m * kRingWarps) / p.k + p.norm.eps)
                            : 1.f;
    float dots[kHalves];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      dots[half] = sum_of<kRingWarps>(partials + ((half * units + unit) * kXRows + m) * kRingWarps) * scale;
    }
    mine.store(p, rope, dots);
  }
}

// kChunks: 16-byte chunks a thread of a weight row in a phase. kXRows: rows of x, rounded up to 2, 4 or 8.
template <class T, int kChunks, int kXRows, RingEnd kEnd>
__global__ void __launch_bounds__(kRingThreads, kRowsMinBlocks<kChunks, kXRows, kEnd>)
    gemv_ring_rows_kernel(const __grid_constant__ GemvParams p, const __grid_constant__ RopeAppendParams rope,
                          const __grid_constant__ RingPlan plan) {
  using Shape = RowsShape<kChunks, kXRows>;
  extern __shared__ __align__(128) char ring[];
  run_ring<T, Shape, true>(p, rope, plan, ring, [&](RingBarriers barriers) {
    float* partials = reinterpret_cast<float*>(ring + plan.slots * Shape::kSlotBytes);
    ring_rows_compute<T, kChunks, kXRows, kEnd>(p, rope, plan, ring, barriers, partials);
  });
}

}  // namespace hf_fastpath
