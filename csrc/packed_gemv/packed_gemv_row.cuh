// One row of x of 16 bits in shared memory, whatever operands of tensor cores are made of it.
#pragma once

#include "packed_gemv/packed_gemv_prepared.cuh"

namespace hf_fastpath {

// Whether a product takes it.
template <class T, int kColumns>
constexpr bool kTakesRow = kColumns == 1 && kXColumns<T> == 1;

// A warp's blocks of x. Made: what is made of it, with store(first span, spans, values of a lane).
template <class T, PackedFormat kFormat, class Made>
struct RowX {
  using Slot = PackedSlot<kFormat, kRingWarps>;
  using Spans = LaneSpans<Slot>;
  static constexpr int kSpanPieces = Spans::kPieces;
  static constexpr int kSpanBytes = 512,
                       kSpanSteps = 64;  // shared memory: of the operands, of steps and excesses
  static constexpr int kSpanNorm = 512;  // of the norm's weight
  static constexpr int kTogether = 2;    // spans that operands are made of at a time
  static constexpr int kFetched = 8;     // and that are copied without a loop
  static constexpr int kBitsOfX = 14;    // scaled values are below two to it

  char* operands;  // [spans]
  int2* steps;     // [spans][8 sub-blocks]: bits of the step, and what quants have in excess times x
  char* norm;      // the norm's weight, [spans]
  float* squares;  // of x, over all phases

  __device__ __forceinline__ RowX(char* ring, const PackedPlan& plan, int warp, int spans, int)
      : operands(ring + plan.x_at + warp * spans * kSpanBytes),
        steps(reinterpret_cast<int2*>(ring + plan.sums_at + warp * spans * kSpanSteps)),
        norm(ring + plan.norm_at + warp * spans * kSpanNorm),
        squares(reinterpret_cast<float*>(ring + plan.scratch_at) + kRingWarps + warp) {}

  // Does what WarpX::load does.
  template <class WaitForInput>
  __device__ __forceinline__ void load(const GemvParams& p, const PackedPlan& plan, int begin, int end,
                                       bool is_first, WaitForInput wait_for_input) const {
    const int lane = threadIdx.x % kWarpSize;
    const Spans spans(begin, end, plan.x_width);
    const bool rms = p.norm.kind == NormKind::kRms;
    if (!is_first) __syncwarp();  // all lanes are done with the phase before
    if (rms)
      spans.template fetch<kFetched>(static_cast<const T*>(p.norm.weight), norm + lane * 16, kSpanNorm, 0,
                                     [] {});
    spans.template fetch<kFetched>(static_cast<const T*>(p.x), operands + lane * 16, kSpanBytes, 0,
                                   [&] {  // where operands will be
                                     if (is_first) wait_for_input();
                                   });
    commit_copies();
    wait_for_copies<0>();
    float square = 0.f;
#pragma unroll 1
    for (int first = 0; first < spans.count; first += kTogether) {
      float values[kTogether][8];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int at = min(first + i, spans.count - 1) * kSpanBytes + lane * 16;  // or the last once more
        Chunk<T, 8>::unpack(load_shared(shared_address(operands + at)), values[i]);
        if (rms) {
          float factors[8];
          Chunk<T, 8>::unpack(load_shared(shared_address(norm + at)), factors);
          const bool counts = i == 0 || first + i < spans.count;
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            if (counts) square = fmaf(values[i][e], values[i][e], square);
            values[i][e] *= factors[e] + p.norm.weight_offset;
          }
        }
      }
      __syncwarp();  // all lanes have read what operands will take the place of
      static_cast<const Made*>(this)->store(first, spans.count, values);
    }
    if (rms) {
      square = warp_sum(square);
      if (lane == 0) *squares = is_first ? square : *squares + square;
    }
    __syncwarp();
  }

  __device__ __forceinline__ float undo_of(int) const { return 1.f; }

 protected:
  // Bits of the largest magnitude, or of NaN, of what kLanes neighbors have of each span.
  template <int kLanes>
  static __device__ __forceinline__ void find_largest(const float (&values)[kTogether][8],
                                                      uint32_t (&bits)[kTogether]) {
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      float most = 0.f;
#pragma unroll
      for (int e = 0; e < 8; ++e) most = max_or_nan(most, fabsf(values[i][e]));
      bits[i] = __float_as_uint(most);
    }
#pragma unroll
    for (int offset = 1; offset < kLanes; offset *= 2)
#pragma unroll
      for (int i = 0; i < kTogether; ++i) bits[i] = max(bits[i], __shfl_xor_sync(kAllLanes, bits[i], offset));
  }
  // What makes the largest lie below 2^kBitsOfX, and what undoes it; what is below 2^-127 of it or so counts
  // as nothing.
  static __device__ __forceinline__ float factor_of(uint32_t bits) {
    return __uint_as_float((127 + kBitsOfX - 1 + 127 - exponent_of(bits)) << 23);
  }
  static __device__ __forceinline__ float step_of(uint32_t bits) {
    return bits < 0x7f800000u ? __uint_as_float((exponent_of(bits) + 1 - kBitsOfX) << 23) : NAN;
  }

 private:
  static __device__ __forceinline__ uint32_t exponent_of(uint32_t bits) { return max(bits >> 23, 14u); }
  static __device__ __forceinline__ float max_or_nan(float a, float b) {
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
    return a;
  }
};

}  // namespace hf_fastpath
