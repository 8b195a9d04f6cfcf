// What: one to sixteen x rows times a quantized matrix, with everything around it: an RMS norm in front,
// bias,
//   activation, residual, the gated pair, or rotation and append to the KV cache behind.
// Work split: one or two blocks an SM, each a range of consecutive output features (or pairs of them), in
//   tiles of 16 weight rows. A tile's quants come through a ring of slots in shared memory, pieces of
//   kPieceBytes a row with their scales and zeros, of which a warp fetches as many as fit before the kernel
//   in front is complete. Eight warps compute, each its blocks of every piece: quants become float16 (one or
//   two instructions for two of them) and are A of mma.m16n8k16, x is B, prepared by each warp for its own
//   blocks in shared memory. Sums over warps wait for one barrier a tile. x is float16 times a power of two
//   for the warp's part of a row; a float32 x is three such parts. Quants are whole numbers of float16's
//   smallest subnormal: bits of a mantissa, no arithmetic. What all quants have in excess (8 of int4_g32, 128
//   of int8, a zero point) is taken off by sums of x. x that is too long for its part of shared memory comes
//   in phases: all tiles over some pieces of k, then over the next.
// Traffic: quants, scales and zeros once, plus m * k * sizeof(T) of x and the norm's weight a block out of
// L2. Roofline: read bandwidth. int4_g32, kernels that overlap: 83 % of it for 4096 to 28672, 71 % for 14336
// to
//   4096, 46 % for 4096 to 4096; int8 88, 77 and 60 % (H200, 2026-11).
#pragma once

#include "packed_gemv/packed_gemv_products.cuh"

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
  constexpr bool kTwoBlocks = HF_FASTPATH_HOPPER && kForm == PackedForm::kInt4G32 && kColumns == 1;

  const int spans = (plan.phase_pieces + WarpX<T, kForm, kColumns>::kSpanPieces - 1) /
                    WarpX<T, kForm, kColumns>::kSpanPieces;
  WarpX<T, kForm, kColumns> x;
  x.operands = reinterpret_cast<uint4*>(ring + plan.x_at) + warp * spans * 2 * int(kStretches) * kColumns * 4;
  x.sums = reinterpret_cast<float*>(ring + plan.sums_at) + warp * spans * 2 * Slot::kSums * kColumns;
  float* const scratch = reinterpret_cast<float*>(ring + plan.scratch_at);  // [2][warps][m]
  x.undo = scratch + warp * p.m, x.squares = scratch + (kRingWarps + warp) * p.m;
  float* const parts = reinterpret_cast<float*>(ring + plan.parts_at);  // [2][warps][m][kTileRows]
  float* const dots = reinterpret_cast<float*>(ring + plan.dots_at);    // [rows][m]

  RingUnit<T, kEnd> mine;
  const auto prepare = [&](int i) { mine.prepare(p, rope, begin + i / p.m, i % p.m); };
  if (tid < outputs) prepare(tid);
  barriers.wait_until_ready();
  PackedReader<kForm> reader(p, plan, ring, barriers);
  const uint32_t operands = shared_address(x.operands + lane), x_sums = shared_address(x.sums + 2 * q);
  int buffer = 0;
#pragma unroll 1
  for (int phase = 0; phase < plan.pieces; phase += plan.phase_pieces) {
    const int phase_end = min(phase + plan.phase_pieces, plan.pieces);
    x.load(p, plan, phase, phase_end, phase == 0, [&]() {
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
      float own[2] = {};  // of add_two_blocks
#pragma unroll 1
      for (int piece = phase; piece < phase_end; ++piece) {
        reader.wait(piece);
        const int left = plan.matrix.blocks - reader.first_block();  // of this warp's and what follows
        if constexpr (kTwoBlocks) {  // the launch has seen to it that there are two, and their scales in the
                                     // ring
#if HF_FASTPATH_HOPPER
          if (left > 0)
            add_two_blocks(reader, operands + (piece - phase) * 512, x_sums + (piece - phase) * 32, own);
#endif
        } else {
#pragma unroll
          for (int i = 0; i < Slot::kWarpBlocks; ++i) {
            if (i < left) add_block(reader, tile, x, i, (piece - phase) * Slot::kWarpBlocks + i, sums);
          }
        }
        uint32_t bits = 0;
#pragma unroll
        for (int h = 0; h < 2; ++h) bits ^= __float_as_uint(kTwoBlocks ? own[h] : sums[h][0][0]);
        reader.release(bits);
      }
      float* const here = parts + (buffer * kRingWarps + warp) * p.m * kTileRows;
      if constexpr (kTwoBlocks) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          sums[h][0][0] = own[h] + __shfl_xor_sync(kAllLanes, own[h], 1);
          sums[h][0][0] += __shfl_xor_sync(kAllLanes, sums[h][0][0], 2);
        }
      }
#pragma unroll
      for (int t = 0; t < kColumnTiles<kColumns>; ++t)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if constexpr (sizeof(T) == 4) {  // parts in a lane's two columns and the neighbor's first
            const int m = t * 2 + q / 2;
            const float low =
                sums[h][t][q % 2 ? 0 : 1] * (q % 2 ? 1.f / (kNextPart * kNextPart) : 1.f / kNextPart);
            const float parts_sum =
                (q % 2 ? 0.f : sums[h][t][0]) + (low + __shfl_xor_sync(kAllLanes, q % 2 ? low : 0.f, 1));
            if (m < p.m && q % 2 == 0) here[m * kTileRows + Slot::row_of(g) + 8 * h] = parts_sum * x.undo[m];
          } else {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const int m = t * 8 + 2 * q + i;
              if (m < p.m) here[m * kTileRows + Slot::row_of(g) + 8 * h] = sums[h][t][i] * x.undo[m];
            }
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
    float scale = kUndoQuants<kForm, kCenters<T>> * plan.matrix.multiplier;
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
__global__ void __launch_bounds__(kRingThreads, 2)
    packed_gemv_kernel(const __grid_constant__ GemvParams p, const __grid_constant__ RopeAppendParams rope,
                       const __grid_constant__ PackedPlan plan, const __grid_constant__ PackedMaps maps) {
  extern __shared__ __align__(1024) char ring[];  // which swizzles count from
  run_packed<kForm>(p, rope, plan, maps, ring, [&](RingBarriers barriers) {
    packed_compute<T, kForm, kColumns, kEnd>(p, rope, plan, ring, barriers);
  });
}

}  // namespace hf_fastpath
