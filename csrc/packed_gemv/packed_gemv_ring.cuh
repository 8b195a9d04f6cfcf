// What: one to sixteen x rows times a quantized matrix, with everything around it: an RMS norm in front,
//   bias, activation, residual, the gated pair, or rotation and append to the KV cache behind.
// Work split: one or two blocks an SM, each a range of consecutive output features (or pairs of them), in
//   tiles of 16 weight rows. A tile's quants come through a ring of slots in shared memory, pieces of
//   kPieceBytes a row with their scales and zeros, of which a warp fetches as many as fit before the kernel
//   in front is complete. Eight warps compute, each its blocks of every piece: quants are A of a product on
//   tensor cores, x is B. Sums over warps wait for one barrier a tile. What x and quants are:
//   - one row of 16 bits beside whole quants: bytes, x two of them (packed_gemv_bytes.cuh);
//   - several rows of 16 bits: float16, made by a kernel in front (packed_gemv_prepared.cuh);
//   - else float16 that each warp makes of its own blocks of x; a float32 x is three such parts.
//   Quants as float16 are whole numbers of its smallest subnormal: bits of a mantissa, no arithmetic; what
//   all of them have in excess (128 of int8, a zero point) is taken off by sums of x. Only where 32 weights
//   have a scale they are multiplied by it. x that is too long for its part of shared memory comes in phases:
//   all tiles over some pieces of k, then over the next.
// Traffic: quants, scales and zeros once, plus x (m * k * sizeof(T), prepared up to 16 columns of float16)
// and
//   the norm's weight a block out of L2.
// Roofline: read bandwidth. int4_g32, kernels that overlap: 83 % of it for 4096 to 28672, 65 % for 14336 to
//   4096, 49 % for 4096 to 4096; int8 89, 75 and 63 % (H200, 2026-11).
#pragma once

#include "packed_gemv/packed_gemv_bytes.cuh"

namespace hf_fastpath {

template <class T, PackedForm kForm, int kColumns, RingEnd kEnd>
__device__ __forceinline__ void packed_compute(const GemvParams& p, const RopeAppendParams& rope,
                                               const PackedPlan& plan, char* ring, RingBarriers barriers) {
  using Slot = PackedSlot<kForm>;
  constexpr int kHalves = kEnd == RingEnd::kPlain ? 1 : 2;
  const int tid = threadIdx.x, warp = tid / kWarpSize, lane = tid % kWarpSize, g = lane / 4, q = lane % 4;
  int begin, end;
  packed_range(plan, begin, end);
  const int units = end - begin, rows = units * kHalves, outputs = units * p.m;
  constexpr bool kBytes = kTakesBytes<T, kForm, kColumns>;
  using X = PackedX<T, kForm, kColumns>;

  const int spans = (plan.phase_pieces + X::kSpanPieces - 1) / X::kSpanPieces;
  float* const scratch = reinterpret_cast<float*>(ring + plan.scratch_at);  // [2][warps][m]
  const X x(ring + plan.x_at, ring + plan.sums_at, scratch, warp, spans, p.m);
  float* const parts = reinterpret_cast<float*>(ring + plan.parts_at);  // [2][warps][m][kTileRows]
  float* const dots = reinterpret_cast<float*>(ring + plan.dots_at);    // [rows][m]

  RingUnit<T, kEnd> mine;
  const auto prepare = [&](int i) { mine.prepare(p, rope, begin + i / p.m, i % p.m); };
  if (tid < outputs) prepare(tid);
  barriers.wait_until_ready();
  PackedReader<kForm> reader(p, plan, ring, barriers);
  int buffer = 0;
#pragma unroll 1
  for (int phase = 0; phase < plan.pieces; phase += plan.phase_pieces) {
    const int phase_end = min(phase + plan.phase_pieces, plan.pieces);
    x.load(p, plan, phase, phase_end, phase == 0, [&]() {
      wait_for_previous_kernel();
      if (tid < outputs) mine.load(p, rope);
    });
    if (phase == 0) trace(TracePoint::kReady);
#pragma unroll 1
    for (int first = 0; first < rows; first += kTileRows) {
      TileRows tile = {};
      if (!HF_FASTPATH_HOPPER || !plan.fetches_scales) {
        tile.find<kForm>(p, rope, plan.ring, begin, units, first, rows);
      }
      PackedSums<kColumns> sums = {};
#pragma unroll 1
      for (int piece = phase; piece < phase_end; ++piece) {
        reader.wait(piece);
        const int left = plan.matrix.blocks - reader.first_block();  // of this warp's and what follows
        if constexpr (kBytes) {
          if (left > 0) X::add(typename X::Operand(x, piece - phase), reader, tile, sums);
        } else {
#pragma unroll
          for (int i = 0; i < Slot::kWarpBlocks; ++i) {
            if (i < left) add_block<T, kForm, kColumns>(reader, tile, x, i, x.block(piece - phase, i), sums);
          }
        }
        reader.release(__float_as_uint(sums[0][0]) ^ __float_as_uint(sums[0][2]));
      }
      float* const here = parts + (buffer * kRingWarps + warp) * p.m * kTileRows;
      const auto put = [&](int m, int h, float sum) {
        if (m < p.m) here[m * kTileRows + Slot::row_of(g) + 8 * h] = sum * x.undo_of(m);
      };
#pragma unroll
      for (int t = 0; t < kColumnTiles<kColumns>; ++t)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float of_columns[2] = {sums[t][2 * h], sums[t][2 * h + 1]};
          if constexpr (kBytes) {
            float sum = of_columns[0] + __shfl_xor_sync(kAllLanes, of_columns[0], 1);
            sum += __shfl_xor_sync(kAllLanes, sum, 2);
            if (q == 0) put(0, h, sum);
          } else if constexpr (sizeof(T) == 4) {  // parts in a lane's two columns and the neighbor's first
            const float low =
                of_columns[q % 2 ? 0 : 1] * (q % 2 ? 1.f / (kNextPart * kNextPart) : 1.f / kNextPart);
            const float sum =
                (q % 2 ? 0.f : of_columns[0]) + (low + __shfl_xor_sync(kAllLanes, q % 2 ? low : 0.f, 1));
            if (q % 2 == 0) put(t * 2 + q / 2, h, sum);
          } else {
#pragma unroll
            for (int i = 0; i < 2; ++i) put(t * 8 + 2 * q + i, h, of_columns[i]);
          }
        }
      sync_some(1, kRingConsumers);  // every warp's part of the tile; the buffer of the tile before is read
      const int row = tid % kTileRows, m = tid / kTileRows;
      if (m < p.m && first + row < rows) {
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < kRingWarps; ++w)
          sum += parts[((buffer * kRingWarps + w) * p.m + m) * kTileRows + row];
        float& dot = dots[(first + row) * p.m + m];
        dot = phase == 0 ? sum : dot + sum;
      }
      buffer ^= 1;
    }
  }
  trace(TracePoint::kSums);
  sync_some(1, kRingConsumers);  // all dots
  trace(TracePoint::kMerged);
  const bool rms = p.norm.kind == Norm::kRms;
#pragma unroll 1
  for (int i = tid; i < outputs; i += kRingConsumers) {
    if (i != tid) {
      prepare(i);
      mine.load(p, rope);
    }
    const int unit = i / p.m, m = i % p.m;
    float scale = (kBytes ? 1.f : kUndoQuants<kForm, kCenters<T>>)*plan.matrix.multiplier;
    if (rms) {
      float squares = 0.f;
#pragma unroll
      for (int w = 0; w < kRingWarps; ++w) squares += scratch[(kRingWarps + w) * p.m + m];
      scale *= rsqrtf(squares / p.k + p.norm.eps);
    }
    float values[kHalves];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      values[half] = dots[(half * units + unit) * p.m + m] * scale;
      if constexpr (kForm == PackedForm::kFp8) {
        const int row = packed_row(p, rope, plan.ring, begin + unit, half);
        values[half] *= __half2float(__ushort_as_half(__ldg(plan.matrix.scales + row)));
      }
    }
    mine.store(p, rope, values);
  }
}

// kColumns: of B, at least: rows of x, or twice as many.
template <class T, PackedForm kForm, int kColumns, RingEnd kEnd>
__global__ void __launch_bounds__(kRingThreads, kColumns > 8 ? 1 : kRingBlocksPerSm)
    packed_gemv_kernel(const __grid_constant__ GemvParams p, const __grid_constant__ RopeAppendParams rope,
                       const __grid_constant__ PackedPlan plan, const __grid_constant__ PackedMaps maps) {
  extern __shared__ __align__(1024) char ring[];  // which swizzles count from
  run_packed<kForm>(p, rope, plan, maps, ring, [&](RingBarriers barriers) {
    packed_compute<T, kForm, kColumns, kEnd>(p, rope, plan, ring, barriers);
  });
}

}  // namespace hf_fastpath
