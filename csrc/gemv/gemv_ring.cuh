// What: one x row times weight rows [n, k], with everything around it: the norm in front, bias,
//   activation, residual, the gated pair, or rotation and append to the KV cache behind.
// Work split: one or two blocks an SM, each a range of consecutive output features (or pairs of them: gate
//   and up, the two halves of a rotation). Weight rows come through a ring of slots in shared memory, which
//   is filled before the kernel in front is complete, because weights do not depend on it
//   (gemv_ring_slots.cuh). Eight warps compute: kGroupWarps of them share a row, a lane keeps its part of x
//   in registers for the whole kernel and reads its part of every row from the ring. Sums over lanes wait
//   until several rows are done, sums over warps until all are: one barrier a kernel.
// Traffic: n * k * sizeof(T) (of both weights when gated) once, plus x and the norm's weight per block out of
//   L2.
// Roofline: read bandwidth. While the ring is filled, no more than RingPlan::in_flight slots are under way:
//   a deeper queue in the memory system would not be faster, and the few small reads between kernels would
//   have to stand in it. Few registers let blocks of several kernels be on an SM at once.
//   float16, a call by itself: 93 % of read bandwidth for 4096 to 32000, 86 % for 14336 to 4096, 68 % for
//   4096 to 4096, gated 92 % for 4096 to 14336 twice; a whole step of Mistral-7B 93 % (H200, 2026-11).
#pragma once

#include <type_traits>

#include "common/inverse_root.cuh"
#include "common/mma.cuh"
#include "gemv/gemv_ring_slots.cuh"

namespace hf_fastpath {

// Chunks a lane up to which the norm's weight fits in registers beside x.
constexpr int kMaxNormedChunks = 4;

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
constexpr int kRingMinBlocks = HF_FASTPATH_HOPPER && kRingMma<T> && kEnd != RingEnd::kAppend &&
                                       (kChunks <= 2 || kRingTwoSums<T, kChunks>)
                                   ? 3
                                   : 2;

// Sums the squares of a lane's part of x, for an RMS norm.
template <class T, int kChunks>
__device__ __forceinline__ float ring_sum_of_squares(const uint4 (&x)[kChunks]) {
  constexpr int kElems = kVecElems<T>;
  float total = 0.f;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    float values[kElems];
    Chunk<T, kElems>::unpack(x[c], values);
#pragma unroll
    for (int e = 0; e < kElems; ++e) total = fmaf(values[e], values[e], total);
  }
  return total;
}

template <class T>
using Two = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;

// x *= weight, rounded once.
template <class T>
__device__ __forceinline__ void multiply_chunk(uint4& x, uint4 weight) {
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    Two<T>& pair = reinterpret_cast<Two<T>*>(&x)[w];
    pair = __hmul2(pair, reinterpret_cast<Two<T>*>(&weight)[w]);
  }
}

// x times weight, or times 1 + weight, rounded once; see GemvNorm::offset_mask.
template <class T>
__device__ __forceinline__ Two<T> weighted(Two<T> x, Two<T> weight, uint32_t offset_mask) {
  const uint32_t addend = reinterpret_cast<const uint32_t&>(x) & offset_mask;
  return __hfma2(x, weight, reinterpret_cast<const Two<T>&>(addend));
}

// The same of a chunk.
template <class T>
__device__ __forceinline__ void multiply_chunk(uint4& x, uint4 weight, uint32_t offset_mask) {
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    Two<T>& pair = reinterpret_cast<Two<T>*>(&x)[w];
    pair = weighted<T>(pair, reinterpret_cast<Two<T>*>(&weight)[w], offset_mask);
  }
}

// Largest magnitude of a part of x, in float16.
template <int kChunks>
__device__ __forceinline__ __half largest_of(const uint4 (&x)[kChunks]) {
  __half2 largest = __half2half2(__ushort_as_half(0));
#pragma unroll
  for (int c = 0; c < kChunks; ++c)
#pragma unroll
    for (int w = 0; w < 4; ++w)
      largest = __hmax2(largest, __habs2(reinterpret_cast<const __half2*>(&x[c])[w]));
  return __hmax(__low2half(largest), __high2half(largest));
}

// Multiplies a part of x by a power of two that keeps float16 from overflowing when it is multiplied by the
// norm's weight. `largest`: bits of the part's largest magnitude. Returns what undoes it.
template <int kChunks>
__device__ __forceinline__ float make_room(uint4 (&x)[kChunks], unsigned largest) {
  // The largest comes to lie from 8 to 16; factors of more than 2^15 are no float16.
  const int exponent = min(15, 18 - static_cast<int>(largest >> 10));
  const __half2 factor = __half2half2(__ushort_as_half(static_cast<unsigned short>((15 + exponent) << 10)));
#pragma unroll
  for (int c = 0; c < kChunks; ++c)
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      __half2& pair = reinterpret_cast<__half2*>(&x[c])[w];
      pair = __hmul2(pair, factor);
    }
  return __uint_as_float((127 - exponent) << 23);
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
  const float scale = inverse_root<T>(over_group(total, scratch + kRingWarps) / k + norm.eps);
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
                                             const RingPlan& plan, char* ring, RingBarriers barriers,
                                             RingSum<T>* partials) {
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

  const auto each_row = [&](auto f) {
#pragma unroll
    for (int r = 0; r < Shape::kRows; ++r) f(group * Shape::kRows + r);
  };
  const auto each_offset = [&](auto f) {
#pragma unroll
    for (int c = 0; c < Shape::kPieceChunks; ++c) f(c * Shape::kColumnBytes + lane_chunk * 16);
  };
  auto reader = ring_reader<T, Shape>(p, rope, plan, ring, barriers, each_row, each_offset);
  reader.start();

  // Only the last chunk of a lane may lie past the end of a row.
  const auto present = [&](int c) {
    return c < kChunks - 1 || lane_chunk + c * kGroupWarps * kWarpSize < chunks;
  };
  const auto element = [&](int c) { return (lane_chunk + c * kGroupWarps * kWarpSize) * kElems; };
  constexpr bool kTakesNorm = kChunks <= kMaxNormedChunks;
  const NormKind norm = kTakesNorm ? p.norm.kind : NormKind::kNone;
  uint4 norm_weight[kChunks];
  if (norm != NormKind::kNone) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      norm_weight[c] =
          present(c) ? C::load_shared_line(static_cast<const T*>(p.norm.weight) + element(c)) : C::zero();
    }
  }
  RingUnit<T, kEnd> mine;
  if (tid < units) mine.prepare(p, rope, begin + tid, 0);
  barriers.wait_until_ready();

  wait_for_previous_kernel();

  if (tid < units) mine.load(p, rope);  // first: code that branches waits for what was loaded before it
  uint4 x[kChunks];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    x[c] = present(c) ? C::load_l2(static_cast<const T*>(p.x) + element(c)) : C::zero();
  }

  float values[kMma ? 1 : kChunks][kElems];  // x in float32
  float undo = 1.f, squares = 0.f;           // squares: of this lane's part of x
  if constexpr (!kMma) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) C::unpack(x[c], values[c]);
  }
  if (norm == NormKind::kRms) {
    squares = ring_sum_of_squares<T>(x);
    if constexpr (kMma) {
      if constexpr (std::is_same_v<T, __half>) {
        undo = make_room(x, __reduce_max_sync(kAllLanes, unsigned(__half_as_ushort(largest_of(x)))));
      }
#pragma unroll
      for (int c = 0; c < kChunks; ++c) multiply_chunk<T>(x[c], norm_weight[c], p.norm.offset_mask);
    } else {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        float w[kElems];
        C::unpack(norm_weight[c], w);
#pragma unroll
        for (int e = 0; e < kElems; ++e) values[c][e] *= w[e] + p.norm.weight_offset;
      }
    }
  } else if (norm == NormKind::kLayer) {
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

#pragma unroll 1
  for (int first = 0; first < rows; first += Shape::kSlotRows * kDeferred) {
    float acc[kSums][kMma ? 4 : 1] = {}, acc_high[kTwoSums ? kSums : 1][4] = {};
#pragma unroll
    for (int d = 0; d < kDeferred; ++d) {
      if (d > 0 && first + d * Shape::kSlotRows >= rows) break;
#pragma unroll
      for (int piece = 0; piece < Shape::kPieces; ++piece) {
        const char* slot = reader.wait() + group * Shape::kRows * Shape::kPieceBytes + lane_chunk * 16;
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
        uint32_t bits = 0;
#pragma unroll
        for (int r = 0; r < Shape::kRows; ++r) bits ^= __float_as_uint(acc[d * Shape::kRows + r][0]);
        reader.release(bits);
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
    if (lane % kLanesPerSum == 0 && row < rows) partials[row * kGroupWarps + warp % kGroupWarps] = sum;
    if (first == 0 && norm == NormKind::kRms) {  // weights of the next rows arrive meanwhile
      const float total = warp_sum(squares);
      if (lane == 0 && warp < kGroupWarps) scratch[warp] = total;
    }
  }
  trace(TracePoint::kSums);
  sync_some(1, kRingConsumers);  // every warp's part of every sum
  trace(TracePoint::kMerged);

  if (tid >= units) return;
  float scale = 1.f;
  if (norm == NormKind::kRms) {
    float total = 0.f;
#pragma unroll
    for (int w = 0; w < kGroupWarps; ++w) total += scratch[w];
    scale = inverse_root<T>(total / p.k + p.norm.eps);
  }
  const auto store = [&](const RingUnit<T, kEnd>& unit, int i) {
    float dots[kHalves];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      dots[half] =
          static_cast<float>(sum_of<kGroupWarps>(partials + (half * units + i) * kGroupWarps)) * scale;
    }
    unit.store(p, rope, dots);
  };
  store(mine, tid);
#pragma unroll 1
  for (int i = tid + kRingConsumers; i < units; i += kRingConsumers) {
    mine.prepare(p, rope, begin + i, 0);
    mine.load(p, rope);
    store(mine, i);
  }
}

template <class T, int kChunks, int kGroupWarps, RingEnd kEnd>
__global__ void __launch_bounds__(kRingThreads, kRingMinBlocks<T, kChunks, kEnd>)
    gemv_ring_kernel(const __grid_constant__ GemvParams p, const __grid_constant__ RopeAppendParams rope,
                     const __grid_constant__ RingPlan plan) {
  if constexpr (HF_FASTPATH_HOPPER || kRingMma<T>) {
    using Shape = RingShape<kChunks, kGroupWarps>;
    extern __shared__ __align__(128) char ring[];
    run_ring<T, Shape, false>(p, rope, plan, ring, [&](RingBarriers barriers) {
      RingSum<T>* partials = reinterpret_cast<RingSum<T>*>(ring + plan.slots * Shape::kSlotBytes);
      ring_compute<T, kChunks, kGroupWarps, kEnd>(p, rope, plan, ring, barriers, partials);
    });
  }
}

}  // namespace hf_fastpath
