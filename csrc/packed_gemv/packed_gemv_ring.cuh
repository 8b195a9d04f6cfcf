// What: one to sixteen x rows times a quantized matrix, with everything around it: an RMS norm in front,
//   bias, activation, residual, the gated pair, or rotation and append to the KV cache behind.
// Work split: one or two blocks an SM, each a range of consecutive output features (or pairs of them), in
//   tiles of 16 weight rows. A tile's quants come through a ring of slots in shared memory, pieces of
//   kPieceBytes a row with their scales and zeros, of which a warp fetches as many as fit before the kernel
//   in front is complete. Eight warps compute, each its blocks of every piece: quants are A of a product on
//   tensor cores, x is B. Sums over warps wait for one barrier a tile. What x and quants are:
//   - one row of 16 bits beside whole quants: bytes, x two of them (packed_gemv_bytes.cuh); beside fp8 and
//     values of a table both float16 (packed_gemv_halves.cuh);
//   - several rows of 16 bits: float16, made by a kernel in front (packed_gemv_prepared.cuh); or, up to eight
//     rows and a matrix of up to 64 M weights, by clusters of two blocks, which take the same rows of weights
//     and half of k each (packed_gemv_lanes.cuh): there four warps share 16 rows of a tile of 32, and the
//     sums of both blocks meet in the shared memory of the one that writes the output;
//   - a float32 x: three float16 terms, which each warp makes of its own blocks of x (packed_gemv_x.cuh).
//   Quants as float16 are whole numbers of its smallest subnormal: bits of a mantissa, no arithmetic; what
//   all of them have in excess (128 of int8, a zero point) is taken off by sums of x. Weights are not
//   multiplied by their scale: sums over those of a scale are. x that is too long for its part of shared
//   memory comes in phases: all tiles over some pieces of k, then over the next.
// Traffic: quants, scales and zeros once, plus x (m * k * sizeof(T), prepared up to 16 columns of float16)
//   and the norm's weight a block out of L2, in clusters half of it.
// Roofline: read bandwidth. int4_g32, kernels that overlap: 87 % of it for 4096 to 28672, 75 % for 14336 to
//   4096, 45 % for 4096 to 4096; int8 93, 82 and 64 % (H200, 2026-11).
#pragma once

#include "common/inverse_root.cuh"
#include "packed_gemv/packed_gemv_bytes.cuh"
#include "packed_gemv/packed_gemv_halves.cuh"

namespace hf_fastpath {

template <class T, PackedFormat kFormat, int kColumns, bool kPrepared>
using PackedX = std::conditional_t<
    kTakesRow<T, kColumns>,
    std::conditional_t<Traits<kFormat>::kHasTable, TableX<T, kFormat>,
                       std::conditional_t<Traits<kFormat>::kIsFloat, HalfX<T, kFormat>, ByteX<T, kFormat>>>,
    std::conditional_t<kPrepared, PreparedX<T, kFormat, kColumns>,
                       std::conditional_t<kTakesLanes<T, kColumns, kPrepared>, LaneX<T, kFormat, kColumns>,
                                          WarpX<kFormat, kColumns>>>>;

template <class T, PackedFormat kFormat, int kColumns, RingEnd kEnd, bool kPrepared>
__device__ __forceinline__ void packed_compute(const GemvParams& p, const RopeAppendParams& rope,
                                               const PackedPlan& plan, char* ring, RingBarriers barriers) {
  constexpr int kLines = kLinesOf<T, kColumns, kPrepared>, kHalves = kEnd == RingEnd::kPlain ? 1 : 2;
  constexpr bool kRow = kTakesRow<T, kColumns>, kLanes = kTakesLanes<T, kColumns, kPrepared>;
  constexpr bool kHasExcess = (kLanes || kPrepared) && Traits<kFormat>::kEachSubBlock && kTakesOff<kFormat>;
  using Slot = PackedSlot<kFormat, kLines>;
  using X = PackedX<T, kFormat, kColumns, kPrepared>;
  const int tid = threadIdx.x, warp = tid / kWarpSize, lane = tid % kWarpSize, g = lane / 4, q = lane % 4;
  const PackedShare<kLanes> share(plan);
  const int units = share.end - share.begin, rows = units * kHalves;
  // This block writes the outputs of a part of the cluster's units.
  const bool is_cluster = HF_FASTPATH_HOPPER && kLanes && plan.ranks > 1;
  const int rank = is_cluster ? blockIdx.x % 2 : 0;
  const int own = is_cluster ? (units + 1) / 2 : units, own_first = rank * own;
  const int outputs = max(0, min(own, units - own_first)) * p.m;

  const int spans = (plan.phase_pieces + X::kSpanPieces - 1) / X::kSpanPieces;
  float* const scratch = reinterpret_cast<float*>(ring + plan.scratch_at);  // [2][warps][m]
  const X x(ring, plan, warp, spans, p.m);
  // Sums of warps [2][lines][m][kWeightRows]; of this block [rows][m], over all phases; or of both of a
  // cluster, for the units whose outputs this block writes, [2][halves][own][m], then squares [2][m].
  float* const partials = reinterpret_cast<float*>(ring + plan.partials_at);
  float* const dots = reinterpret_cast<float*>(ring + plan.dots_at);
  float* const received = reinterpret_cast<float*>(ring + plan.received_at);
  float* const received_squares = received + 2 * kHalves * own * p.m;

  RingUnit<T, kEnd, false> mine;  // see fits_packed_append()
  const auto prepare = [&](int i) { mine.prepare(p, rope, share.begin + own_first + i / p.m, i % p.m); };
  if (tid < outputs) prepare(tid);
  barriers.wait_until_ready();
  PackedReader<kFormat, kLines> reader(p, plan, ring, barriers);
  uint32_t operands_at = 0, excess_at = 0;
  if constexpr (!kRow) operands_at = x.operands_of_lane();
  if constexpr (kHasExcess) excess_at = x.excess_of_lane();
  asm volatile("" : "+r"(operands_at), "+r"(excess_at));  // kept, not found anew for every piece

  int buffer = 0;
#pragma unroll 1
  for (int phase = share.first_piece; phase < share.end_piece;
       phase = kLanes ? share.end_piece : phase + plan.phase_pieces) {
    const int phase_end = kLanes ? share.end_piece : min(phase + plan.phase_pieces, share.end_piece);
    const bool is_first = kLanes || phase == 0;
    x.load(p, plan, phase, phase_end, is_first, [&]() {
      wait_for_previous_kernel();
      if (tid < outputs) mine.load(p, rope);
    });
    if (is_first) trace(TracePoint::kReady);
    if (is_first && is_cluster) wait_cluster();  // all blocks have started
#pragma unroll 1
    for (int first = 0; first < rows; first += Slot::kWeightRows) {
      TileRows tile = {};
      if (!reader.fetches_scales()) {
        tile.find<Slot>(p, rope, plan.ring, share.begin, units, first, rows);
      }
      PackedAccumulators<kColumns> accumulators = {};
#pragma unroll 1
      for (int piece = phase; piece < phase_end; ++piece) {
        reader.wait(piece);
        const int left = plan.matrix.blocks - reader.first_block();  // of this warp's and what follows
        if constexpr (kRow) {
          if (left > 0) X::add(typename X::Operand(x, piece - phase), reader, tile, accumulators);
        } else {
          constexpr int kBlockOperands = int(kSubBlocks) * kColumns * 64;
          const int of_phase = piece - phase;
          if constexpr (kHasExcess)
            add_excess<kColumns>(reader, tile, excess_at + of_phase * X::kPieceSteps, left, accumulators);
          // In clusters what there is not has scales, and values of x, of 0; a branch less is faster where no
          // register is spilled for it.
          constexpr bool kTakesAll = kLanes && kColumns == 4 && kEnd != RingEnd::kAppend;
#pragma unroll
          for (int i = 0; i < Slot::kWarpBlocks; ++i) {
            if (!kTakesAll && i >= left) break;
            const int block = of_phase * X::kPieceBlocks + i;
            const LineScales<kFormat> scales(reader, tile, i, left - i);
            add_block<T, kFormat, kColumns>(reader, tile, scales, x, i, operands_at + block * kBlockOperands,
                                            block, accumulators);
          }
        }
        reader.release(__float_as_uint(accumulators[0][0]) ^ __float_as_uint(accumulators[0][2]));
      }
      float* const here =
          partials + (buffer * kLines + Slot::line()) * p.m * Slot::kWeightRows + Slot::row_warp() * kMmaRows;
      const auto put = [&](int m, int h, float sum) {
        if (m < p.m) here[m * Slot::kWeightRows + Slot::row_of(g) + 8 * h] = sum * x.undo_of(m);
      };
#pragma unroll
      for (int t = 0; t < kColumnTiles<kColumns>; ++t)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float of_columns[2] = {accumulators[t][2 * h], accumulators[t][2 * h + 1]};
          if constexpr (kRow) {
            float sum = of_columns[0] + __shfl_xor_sync(kAllLanes, of_columns[0], 1);
            sum += __shfl_xor_sync(kAllLanes, sum, 2);
            if (q == 0) put(0, h, sum);
          } else if constexpr (sizeof(T) == 4) {  // terms in a lane's two columns and the neighbor's first
            const float low =
                of_columns[q % 2 ? 0 : 1] * (q % 2 ? 1.f / (kNextTerm * kNextTerm) : 1.f / kNextTerm);
            const float sum =
                (q % 2 ? 0.f : of_columns[0]) + (low + __shfl_xor_sync(kAllLanes, q % 2 ? low : 0.f, 1));
            if (q % 2 == 0) put(t * 2 + q / 2, h, sum);
          } else {
#pragma unroll
            for (int i = 0; i < 2; ++i) put(t * 8 + 2 * q + i, h, of_columns[i]);
          }
        }
      sync_some(1, kRingConsumers);  // every warp's part of the tile; the buffer of the tile before is read
      const int row = first + tid % Slot::kWeightRows, m = tid / Slot::kWeightRows;
      static_assert(kRingConsumers / Slot::kWeightRows >= (kLanes ? kColumns : 16), "a sum a thread");
      if (m < p.m && row < rows) {
        const float* const from =
            partials + (buffer * kLines * p.m + m) * Slot::kWeightRows + tid % Slot::kWeightRows;
        float sum = 0.f;
#pragma unroll
        for (int line = 0; line < kLines; ++line) sum += from[line * p.m * Slot::kWeightRows];
        if (is_cluster) {
          const int half = row >= units, unit = row - half * units;
          const int owner = unit >= own, at = (rank * kHalves + half) * own + unit - owner * own;
          store_cluster(cluster_address(received + at * p.m + m, owner), sum);
        } else {
          float& dot = dots[row * p.m + m];
          dot = is_first ? sum : dot + sum;
        }
      }
      buffer ^= 1;
    }
  }
  trace(TracePoint::kSums);
  const bool rms = p.norm.kind == NormKind::kRms;
  const auto squares_of = [&](int m) {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < kRingWarps; ++w) sum += scratch[(kRingWarps + w) * p.m + m];
    return sum;
  };
  if (is_cluster) {
    if (rms && tid < p.m) {
      const float sum = squares_of(tid);
#pragma unroll
      for (int to = 0; to < 2; ++to)
        store_cluster(cluster_address(received_squares + rank * p.m + tid, to), sum);
    }
    __syncwarp();
    arrive_cluster();
    wait_cluster();  // all sums
  } else {
    sync_some(1, kRingConsumers);  // all dots
  }
  trace(TracePoint::kMerged);
#pragma unroll 1
  for (int i = tid; i < outputs; i += kRingConsumers) {
    if (i != tid) {
      prepare(i);
      mine.load(p, rope);
    }
    const int unit = i / p.m, m = i % p.m;
    float scale = (kRow ? 1.f : kUndoQuants<kFormat, kCenters<T, kFormat>>)*plan.matrix.multiplier;
    if (rms) {
      float squares = 0.f;
      if (is_cluster) {
        squares = received_squares[m] + received_squares[p.m + m];
      } else {
        squares = squares_of(m);
      }
      scale *= inverse_root<T>(squares / p.k + p.norm.eps);
    }
    float values[kHalves];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const float* const from = (is_cluster ? received : dots) + (half * own + unit) * p.m + m;
      values[half] = from[0];
      if (is_cluster) values[half] += from[kHalves * own * p.m];
      values[half] *= scale;
      if constexpr (Traits<kFormat>::kScalesSums) {
        const int row = packed_row(p, rope, plan.ring, share.begin + own_first + unit, half);
        values[half] *= scale_of_row<kFormat>(plan.matrix, row);
      }
    }
    mine.store(p, rope, values);
  }
}

// Blocks whose registers an SM has room for: with three, one of the next kernel starts early where its ring
// is small. An append has too much to keep, and a table leaves no room for a third.
template <class T, PackedFormat kFormat, int kColumns, RingEnd kEnd>
constexpr int kPackedMinBlocks =
    kColumns > 8                                                                        ? 1
    : kTakesRow<T, kColumns> && kEnd != RingEnd::kAppend && !Traits<kFormat>::kHasTable ? 3
                                                                                        : 2;

// kColumns: of B, at least: rows of x, or twice as many.
template <class T, PackedFormat kFormat, int kColumns, RingEnd kEnd, bool kPrepared>
__global__ void __launch_bounds__(HF_FASTPATH_HOPPER ? kRingThreads : kRingConsumers,
                                  kPackedMinBlocks<T, kFormat, kColumns, kEnd>)
    packed_gemv_kernel(const __grid_constant__ GemvParams p, const __grid_constant__ RopeAppendParams rope,
                       const __grid_constant__ PackedPlan plan, const __grid_constant__ PackedMaps maps) {
  extern __shared__ __align__(1024) char packed_shared[];  // which swizzles count from
  char* const packed_ring = packed_shared + kTableBytes<T, kFormat, kColumns>;
  if constexpr (HF_FASTPATH_HOPPER || !kTakesLanes<T, kColumns, kPrepared>) {  // elsewhere are no clusters
    run_packed<kFormat, kLinesOf<T, kColumns, kPrepared>>(
        p, rope, plan, maps, packed_ring, [&](RingBarriers barriers) {
          packed_compute<T, kFormat, kColumns, kEnd, kPrepared>(p, rope, plan, packed_ring, barriers);
        });
  }
}

}  // namespace hf_fastpath
