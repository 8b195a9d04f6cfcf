// x as packed_gemv_ring.cuh has it in shared memory: operands of tensor cores.
#pragma once

#include "packed_gemv/packed_gemv_slot.cuh"

namespace hf_fastpath {

// Eight values of x or of a norm's weight, as they lie.
template <class T>
struct Eight {
  uint4 part[sizeof(T) / 2];

  __device__ __forceinline__ void unpack(float (&to)[8]) const {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        to[4 * i] = __uint_as_float(part[i].x), to[4 * i + 1] = __uint_as_float(part[i].y);
        to[4 * i + 2] = __uint_as_float(part[i].z), to[4 * i + 3] = __uint_as_float(part[i].w);
      }
    } else {
      Chunk<T, 8>::unpack(part[0], to);
    }
  }
};

// Eight float16 values of x, neighbors in pairs, as B has them for one word of 4 bits or two of 8 bits.
template <PackedFormat kFormat, bool kCentered>
__device__ __forceinline__ uint4 as_operand(const uint32_t (&x)[4]) {
  constexpr bool kInOrder = kBits<kFormat> == 8 || (Traits<kFormat>::kHasTable && !kIsMinifloat<kFormat>);
  if constexpr (kInOrder) return make_uint4(x[0], x[1], x[2], x[3]);
  const auto high = [](uint32_t pair) {  // see Quants
    const __half2 less = __hmul2(*reinterpret_cast<__half2*>(&pair),
                                 __float2half2_rn(kCentered || kIsMinifloat<kFormat> ? 1.f : 0.0625f));
    return *reinterpret_cast<const uint32_t*>(&less);
  };
  return make_uint4(pair_low(x[0], x[2]), high(pair_high(x[0], x[2])), pair_low(x[1], x[3]),
                    high(pair_high(x[1], x[3])));
}

__device__ __forceinline__ __half2 power_of_two(int exponent) {  // from 2^-14 to 2^15
  return __half2half2(__ushort_as_half(static_cast<unsigned short>((15 + exponent) << 10)));
}

__device__ __forceinline__ float warp_max(float value) {  // not below 0
  return __uint_as_float(__reduce_max_sync(kAllLanes, __float_as_uint(value)));
}

// A lane's eight values of each of its warp's spans, two blocks of pieces [begin, end) of a row.
template <class Slot>
struct LaneSpans {
  static constexpr int kPieces = 2 / Slot::kWarpBlocks;                        // of a span
  static constexpr int kStride = kPieces * Slot::kBlocks * int(kPackedBlock);  // values to the next
  int count, first, limit;  // spans; first value; from where on there are none

  __device__ __forceinline__ LaneSpans(int begin, int end, int width) {
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, half = lane / 16;
    const int block = Slot::kWarpBlocks == 2 ? begin * Slot::kBlocks + 2 * warp + half
                                             : (begin + half) * Slot::kBlocks + warp;
    count = (end - begin + kPieces - 1) / kPieces;
    first = block * int(kPackedBlock) + lane % 16 * 8;
    limit = min(width, end * Slot::kBlocks * int(kPackedBlock));
  }

  // Copies those of a row to `to`, spans `stride` bytes apart, the 16-byte parts of each `part_stride`.
  // `wait_for_input`: called before, once all that is known is in registers: what follows it is waited for.
  // kUnrolled: spans whose copies are code of their own.
  template <int kUnrolled, class T, class WaitForInput>
  __device__ __forceinline__ void fetch(const T* row, char* to, int stride, int part_stride,
                                        WaitForInput wait_for_input) const {
    constexpr int kParts = int(sizeof(T)) / 2;
    const T* from = row + first;
    asm volatile("" : "+l"(from), "+l"(to));
    wait_for_input();
    const auto copy = [&](int span) {
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        copy_async(to + span * stride + part * part_stride, from + span * kStride + part * 4,
                   first + span * kStride < limit);
    };
#pragma unroll
    for (int span = 0; span < kUnrolled; ++span)
      if (span < count) copy(span);
#pragma unroll 1
    for (int span = kUnrolled; span < count; ++span) copy(span);
  }
};

// A warp's blocks of a float32 x in shared memory: spans of two blocks, of which a lane prepares eight
// values.
template <PackedFormat kFormat, int kColumns>
struct WarpX {
  using T = float;
  using Slot = PackedSlot<kFormat, kRingWarps>;
  using Spans = LaneSpans<Slot>;
  static constexpr int kSpanPieces = Spans::kPieces;

  uint4* operands;  // [spans][2][kSubBlocks][kColumns][4]
  char* norm;       // the norm's weight, [spans][kRaw][lanes]
  float* squares;   // [m], over all phases
  float* undo;      // [m], of a phase

  static constexpr int kSpanBytes = 2 * int(kSubBlocks) * kColumns * 64;  // shared memory of a span
  static constexpr int kRaw = sizeof(T) / 2;  // 16-byte parts of eight values, which lie where columns will
  static constexpr int kSpanSteps = 0, kSpanNorm = kRaw * kWarpSize * 16;
  static constexpr int kPieceBlocks = Slot::kWarpBlocks, kPieceSteps = 0;

  // PackedPlan::scratch_at: of all warps, undo [warps][m], then squares [warps][m].
  __device__ __forceinline__ WarpX(char* ring, const PackedPlan& plan, int warp, int spans, int m)
      : operands(reinterpret_cast<uint4*>(ring + plan.x_at + warp * spans * kSpanBytes)),
        norm(ring + plan.norm_at + warp * spans * kSpanNorm),
        squares(reinterpret_cast<float*>(ring + plan.scratch_at) + (kRingWarps + warp) * m),
        undo(reinterpret_cast<float*>(ring + plan.scratch_at) + warp * m) {}

  const float* sums = nullptr;
  // Where a lane's operands start. Columns that do not exist are others once more: nobody reads their sums.
  __device__ __forceinline__ uint32_t operands_of_lane() const {
    const int lane = threadIdx.x % kWarpSize;
    return shared_address(operands) + (lane / 4 % (kColumns < 8 ? kColumns : 8) * 4 + lane % 4) * 16;
  }
  __device__ __forceinline__ float undo_of(int m) const { return undo[m]; }

  // Prepares the blocks of pieces [begin, end). `wait_for_input`: called before x is read for the first time.
  template <class WaitForInput>
  __device__ __forceinline__ void load(const GemvParams& p, const PackedPlan& plan, int begin, int end,
                                       bool is_first, WaitForInput wait_for_input) const {
    const int lane = threadIdx.x % kWarpSize;
    const Spans spans(begin, end, plan.x_width);
    const bool rms = p.norm.kind == NormKind::kRms;
    if (!is_first) __syncwarp();  // all lanes are done with the phase before
    char* const of_norm = norm + lane * 16;
    if (rms) {
      spans.template fetch<0>(static_cast<const T*>(p.norm.weight), of_norm, kSpanNorm, kWarpSize * 16,
                              [] {});
    }
    // x comes to lie where a lane puts what it makes of it.
#pragma unroll 1
    for (int m = 0; m < p.m; ++m) {
      spans.template fetch<0>(static_cast<const T*>(p.x) + m * plan.x_width,
                              reinterpret_cast<char*>(place(0, m, 0)), kSpanBytes, 64, [&] {
                                if (is_first && m == 0) wait_for_input();
                              });
    }
    commit_copies();
    wait_for_copies<0>();
    const auto values_of = [&](int span, int m) {
      Eight<T> values;
#pragma unroll
      for (int i = 0; i < kRaw; ++i) values.part[i] = *place(span, m, i);
      return values;
    };
    const auto norm_weight = [&](int span) {
      Eight<T> weight;
#pragma unroll
      for (int i = 0; i < kRaw; ++i)
        weight.part[i] = *reinterpret_cast<const uint4*>(of_norm + (span * kRaw + i) * kWarpSize * 16);
      return weight;
    };
    float most_weight = 1.f;
    if (rms) {
      most_weight = 0.f;
#pragma unroll 2
      for (int span = 0; span < spans.count; ++span)
        most_weight = fmaxf(most_weight, largest(norm_weight(span)));
      most_weight = warp_max(most_weight) + p.norm.weight_offset;
    }
#pragma unroll 1
    for (int m = 0; m < p.m; ++m) {
      float most = 0.f, square = 0.f;
#pragma unroll 2
      for (int span = 0; span < spans.count; ++span) most = fmaxf(most, largest(values_of(span, m)));
      // The largest comes to lie below 2^15.
      const int exponent = max(14 - 126, int(__float_as_uint(warp_max(most) * most_weight) >> 23) - 127);
#pragma unroll 2
      for (int span = 0; span < spans.count; ++span) {
        const Eight<T> found = values_of(span, m);
        const float factor = __uint_as_float(unsigned(127 + 14 - exponent) << 23);
        float values[8];
        found.unpack(values);
        if (rms) {
          float factors[8];
          norm_weight(span).unpack(factors);
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            square = fmaf(values[e], values[e], square);
            values[e] *= factors[e] + p.norm.weight_offset;
          }
        }
#pragma unroll
        for (int e = 0; e < 8; ++e) values[e] *= factor;
#pragma unroll
        for (int term = 0; term < kXTerms<T>; ++term) {
          uint32_t rounded[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            rounded[i] = pack2(values[2 * i], values[2 * i + 1], __half());
            const float2 taken = unpack2(rounded[i], __half());
            values[2 * i] = (values[2 * i] - taken.x) * kNextTerm;
            values[2 * i + 1] = (values[2 * i + 1] - taken.y) * kNextTerm;
          }
          *place(span, m, term) = as_operand<kFormat, kCenters<T, kFormat>>(rounded);
        }
      }
      if (rms) square = warp_sum(square);
      if (lane == 0) {
        undo[m] = __uint_as_float(unsigned(127 - 14 + exponent) << 23);
        if (rms) squares[m] = is_first ? square : squares[m] + square;
      }
    }
    __syncwarp();
  }

 private:
  static __device__ __forceinline__ float largest(const Eight<T>& of) {
    float values[8], most = 0.f;
    of.unpack(values);
#pragma unroll
    for (const float value : values) most = fmaxf(most, fabsf(value));
    return most;
  }
  // The lane's operand for a column of row m.
  __device__ __forceinline__ uint4* place(int span, int m, int term) const {
    const int lane = threadIdx.x % kWarpSize, block = span * 2 + lane / 16, sub_block = lane % 16 / 4,
              q = lane % 4;
    return operands + ((block * int(kSubBlocks) + sub_block) * kColumns + m * kXColumns<T> + term) * 4 + q;
  }
};

}  // namespace hf_fastpath
