// x as packed_gemv_ring.cuh has it in shared memory: operands of tensor cores.
#pragma once

#include "packed_gemv/packed_gemv_slot.cuh"

namespace hf_fastpath {

// Eight values of x or of a norm's weight, as they lie.
template <class T>
struct Eight {
  uint4 part[sizeof(T) / 2];

  // Largest magnitude.
  __device__ __forceinline__ float largest() const {
    if constexpr (sizeof(T) == 4) {
      float values[8], most = 0.f;
      unpack(values);
#pragma unroll
      for (const float value : values) most = fmaxf(most, fabsf(value));
      return most;
    } else {
      const auto* pairs = reinterpret_cast<const Two<T>*>(part);
      const Two<T> most = __hmax2(__hmax2(__habs2(pairs[0]), __habs2(pairs[1])),
                                  __hmax2(__habs2(pairs[2]), __habs2(pairs[3])));
      return fmaxf(to_float(most.x), to_float(most.y));
    }
  }
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

// Eight float16 values of x, neighbors in pairs, as B has them for one word of int4 or two of 8 bits.
template <PackedForm kForm, bool kCentered>
__device__ __forceinline__ uint4 as_operand(const uint32_t (&x)[4]) {
  if constexpr (kBits<kForm> == 8) return make_uint4(x[0], x[1], x[2], x[3]);
  const auto high = [](uint32_t pair) {  // see Quants
    const __half2 less =
        __hmul2(*reinterpret_cast<__half2*>(&pair), __float2half2_rn(kCentered ? 1.f : 0.0625f));
    return *reinterpret_cast<const uint32_t*>(&less);
  };
  return make_uint4(pair_low(x[0], x[2]), high(pair_high(x[0], x[2])), pair_low(x[1], x[3]),
                    high(pair_high(x[1], x[3])));
}

__device__ __forceinline__ float warp_max(float value) {  // not below 0
  return __uint_as_float(__reduce_max_sync(kAllLanes, __float_as_uint(value)));
}

// A lane's first value of a span, two blocks of its warp, of pieces [begin, end); not below `width`: there is
// none.
template <class Slot>
__device__ __forceinline__ int warp_element(int begin, int end, int span, int width) {
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, half = lane / 16;
  if constexpr (Slot::kWarpBlocks == 2) {
    return ((begin + span) * Slot::kBlocks + 2 * warp + half) * int(kPackedBlock) + lane % 16 * 8;
  } else {
    const int piece = begin + 2 * span + half;
    return piece < end ? (piece * Slot::kBlocks + warp) * int(kPackedBlock) + lane % 16 * 8 : width;
  }
}

// A warp's blocks of x in shared memory, for float32 and for what neither ByteX nor PreparedX takes: spans of
// two blocks, of which a lane prepares eight values.
template <class T, PackedForm kForm, int kColumns>
struct WarpX {
  using Slot = PackedSlot<kForm>;
  static constexpr int kSpanPieces = 2 / Slot::kWarpBlocks;

  uint4* operands;  // [spans][2][kStretches][kColumns][4]
  float* squares;   // [m], over all phases
  float* undo;      // [m], of a phase

  static constexpr int kSpanBytes = 2 * int(kStretches) * kColumns * 64;  // shared memory of a span
  static constexpr int kSpanSteps = 0;

  // `scratch`: of all warps, undo [warps][m], then squares [warps][m].
  __device__ __forceinline__ WarpX(char* operands, char*, float* scratch, int warp, int spans, int m)
      : operands(reinterpret_cast<uint4*>(operands + warp * spans * kSpanBytes)),
        squares(scratch + (kRingWarps + warp) * m),
        undo(scratch + warp * m) {}

  // Place of a warp's block of a piece of the phase.
  __device__ __forceinline__ int block(int piece, int of_warp) const {
    return piece * Slot::kWarpBlocks + of_warp;
  }
  __device__ __forceinline__ float undo_of(int m) const { return undo[m]; }

  // Prepares the blocks of pieces [begin, end). `wait_for_input`: called before x is read for the first time.
  template <class WaitForInput>
  __device__ __forceinline__ void load(const GemvParams& p, const PackedPlan& plan, int begin, int end,
                                       bool is_first, WaitForInput wait_for_input) const {
    const int lane = threadIdx.x % kWarpSize;
    const int k = plan.x_width, spans = (end - begin + kSpanPieces - 1) / kSpanPieces;
    const bool rms = p.norm.kind == Norm::kRms;
    const auto element = [&](int span) { return warp_element<Slot>(begin, end, span, k); };
    const auto norm_weight = [&](int span) {
      Eight<T> weight = {};
      const int at = element(span);
      if (at < k) {
#pragma unroll
        for (int i = 0; i < kRaw; ++i)
          weight.part[i] =
              __ldg(reinterpret_cast<const uint4*>(static_cast<const T*>(p.norm.weight) + at) + i);
      }
      return weight;
    };
    if (!is_first) __syncwarp();  // all lanes are done with the phase before
    float most_weight = 1.f;
    if (rms) {
      most_weight = 0.f;
#pragma unroll 2
      for (int span = 0; span < spans; ++span) most_weight = fmaxf(most_weight, norm_weight(span).largest());
      most_weight = warp_max(most_weight);
    }
    if (is_first) wait_for_input();
    // x comes to lie where a lane puts what it makes of it.
#pragma unroll 1
    for (int m = 0; m < p.m; ++m) {
#pragma unroll 2
      for (int span = 0; span < spans; ++span) {
        const int at = element(span);
        const uint4* from = reinterpret_cast<const uint4*>(static_cast<const T*>(p.x) + m * k + at);
#pragma unroll
        for (int i = 0; i < kRaw; ++i) copy_async(place(span, m, i), at < k ? from + i : p.x, at < k);
      }
    }
    commit_copies();
    wait_for_copies<0>();
    const auto values_of = [&](int span, int m) {
      Eight<T> values;
#pragma unroll
      for (int i = 0; i < kRaw; ++i) values.part[i] = *place(span, m, i);
      return values;
    };
#pragma unroll 1
    for (int m = 0; m < p.m; ++m) {
      float most = 0.f, square = 0.f;
#pragma unroll 2
      for (int span = 0; span < spans; ++span) most = fmaxf(most, values_of(span, m).largest());
      // The largest comes to lie below 2^15.
      const int exponent = max(14 - 126, int(__float_as_uint(warp_max(most) * most_weight) >> 23) - 127);
#pragma unroll 2
      for (int span = 0; span < spans; ++span) {
        const Eight<T> found = values_of(span, m);
        if constexpr (std::is_same_v<T, __half>) {
          if (!rms) {
            *place(span, m, 0) = as_operand<kForm, kCenters<T>>(scaled(found, 14 - exponent).words);
            continue;
          }
        }
        const float factor = __uint_as_float(unsigned(127 + 14 - exponent) << 23);
        float values[8];
        found.unpack(values);
        if (rms) {
          float factors[8];
          norm_weight(span).unpack(factors);
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            square = fmaf(values[e], values[e], square);
            values[e] *= factors[e];
          }
        }
#pragma unroll
        for (int e = 0; e < 8; ++e) values[e] *= factor;
#pragma unroll
        for (int part = 0; part < kXParts<T>; ++part) {
          uint32_t rounded[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            rounded[i] = pack2(values[2 * i], values[2 * i + 1], __half());
            const float2 taken = unpack2(rounded[i], __half());
            values[2 * i] = (values[2 * i] - taken.x) * kNextPart;
            values[2 * i + 1] = (values[2 * i + 1] - taken.y) * kNextPart;
          }
          *place(span, m, part) = as_operand<kForm, kCenters<T>>(rounded);
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
  static constexpr int kRaw = sizeof(T) / 2;  // 16-byte pieces of eight values, which lie where columns will

  // The lane's operand for a column of row m.
  __device__ __forceinline__ uint4* place(int span, int m, int part) const {
    const int lane = threadIdx.x % kWarpSize, block = span * 2 + lane / 16, stretch = lane % 16 / 4,
              q = lane % 4;
    return operands + ((block * int(kStretches) + stretch) * kColumns + m * kXColumns<T> + part) * 4 + q;
  }

  struct Pairs {
    uint32_t words[4];
  };

  // x times 2^exponent, which need not be a float16; not below 2^-14.
  static __device__ __forceinline__ Pairs scaled(const Eight<T>& x, int exponent) {
    const int first = min(exponent, 15), second = min(exponent - first, 15);
    const auto power = [](int e) {
      return __half2half2(__ushort_as_half(static_cast<unsigned short>((15 + e) << 10)));
    };
    Pairs made;
    const auto* pairs = reinterpret_cast<const __half2*>(x.part);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __half2 pair = __hmul2(__hmul2(pairs[i], power(first)), power(second));
      made.words[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
    return made;
  }
};

}  // namespace hf_fastpath
