// Several rows of a 16-bit x as operands of tensor cores, for packed_gemv_ring.cuh.
#pragma once

#include "packed_gemv/packed_gemv_products.cuh"

namespace hf_fastpath {

// Where each sub-block has a scale: sums over eight sub-blocks of x, [8][kColumns], become, at their place, B
// of add_excess().
template <int kColumns>
__device__ __forceinline__ void split_excess(float* sums) {
  const int lane = threadIdx.x % kWarpSize, g = lane / 4, q = lane % 4;
  uint2 split[kColumnTiles<kColumns>];
#pragma unroll
  for (int t = 0; t < kColumnTiles<kColumns>; ++t) {
    const int column = kColumns == 4 ? g % 4 : t * 8 + g;
    const float first = sums[2 * q * kColumns + column], second = sums[(2 * q + 1) * kColumns + column];
    split[t].x = pack2(first, second, __half());
    const float2 taken = unpack2(split[t].x, __half());
    split[t].y = pack2(first - taken.x, second - taken.y, __half());
  }
  __syncwarp();  // all of them are read
#pragma unroll
  for (int t = 0; t < kColumnTiles<kColumns>; ++t) {
    if (kColumns > 4 || g < 4) reinterpret_cast<uint2*>(sums)[t * kWarpSize + lane] = split[t];
  }
  __syncwarp();  // and written, for other lanes
}

// Where a lane has its part of it, in bytes.
template <int kColumns>
__device__ __forceinline__ int excess_lane() {
  return threadIdx.x % (kColumns == 4 ? 16 : kWarpSize) * 8;
}

// x in shared memory: of each line of a piece the operands of its blocks, normed, and times a power of two
// for every row. A lane makes what a lane at its place needs: a unit is 16 bytes a lane, of eight columns by
// a sub-block or of four by two sub-blocks. Warps that share a line make a part of its blocks each. Sums of x
// that take off what quants have in excess, and those of squares, are products of tensor cores too.
template <class T, PackedFormat kFormat, int kColumns>
struct LaneX {
  static constexpr int kLines = kLinesOf<T, kColumns, false>;
  using Slot = PackedSlot<kFormat, kLines>;
  static constexpr int kTiles = kColumnTiles<kColumns>, kTogether = kColumns == 4 ? 2 : 1;
  static constexpr int kSpanPieces = 1;
  static constexpr int kBlockUnits = kColumns / 2, kOfBlock = kBlockUnits / kTiles;
  static constexpr int kSpanBytes = Slot::kWarpBlocks * kBlockUnits * kWarpSize * 16;  // of a line in a piece
  static constexpr bool kEachSubBlock = Traits<kFormat>::kEachSubBlock, kWhole = kTakesOff<kFormat>;
  static constexpr int kSpanSteps = !kWhole         ? 0
                                    : kEachSubBlock ? kColumns * 32
                                                    : Slot::kWarpBlocks * kColumns * 4;
  static constexpr int kPieceBlocks = Slot::kWarpBlocks, kPieceSteps = kSpanSteps;
  static constexpr int kSpanNorm = Slot::kWarpBlocks * int(kPackedBlock) * 2;

  uint4* operands;  // [pieces][blocks][kSubBlocks][kColumns][4]
  char* steps;      // kEachSubBlock: [pieces], as B of add_excess(); else floats [pieces][blocks][kColumns]
  const float* sums;
  char* norm;      // the norm's weight, [pieces][blocks]
  float* undo;     // [m]
  float* squares;  // [m]
  float* largest;  // [kRingWarps][16]: of each warp's blocks

  __device__ __forceinline__ LaneX(char* ring, const PackedPlan& plan, int warp, int spans, int m)
      : operands(reinterpret_cast<uint4*>(ring + plan.x_at + Slot::line() * spans * kSpanBytes)),
        steps(ring + plan.sums_at + Slot::line() * spans * kSpanSteps),
        sums(reinterpret_cast<const float*>(steps)),
        norm(ring + plan.norm_at + Slot::line() * spans * kSpanNorm) {
    float* const scratch = reinterpret_cast<float*>(ring + plan.scratch_at);
    undo = scratch + warp * m, squares = scratch + (kRingWarps + warp) * m;
    largest = scratch + 2 * kRingWarps * m;
  }

  __device__ __forceinline__ float undo_of(int m) const { return undo[m]; }

  // Where a lane's operands and its part of B of add_excess() start.
  __device__ __forceinline__ uint32_t operands_of_lane() const {
    return shared_address(operands) + threadIdx.x % (kColumns == 4 ? 16 : kWarpSize) * 16;
  }
  __device__ __forceinline__ uint32_t excess_of_lane() const {
    return shared_address(steps) + excess_lane<kColumns>();
  }

  // Does what WarpX::load does, once.
  template <class WaitForInput>
  __device__ __forceinline__ void load(const GemvParams& p, const PackedPlan& plan, int begin, int end, bool,
                                       WaitForInput wait_for_input) const {
    const int lane = threadIdx.x % kWarpSize, g = lane / 4, q = lane % 4;
    const int all_blocks = (end - begin) * Slot::kWarpBlocks, width = plan.x_width;
    const int first_block = all_blocks * Slot::row_warp() / Slot::kRowWarps,
              blocks = all_blocks * (Slot::row_warp() + 1) / Slot::kRowWarps;  // of this warp
    const bool rms = p.norm.kind == NormKind::kRms;
    const auto value_of = [&](int block) {
      const int piece = begin + block / Slot::kWarpBlocks;
      return (piece * Slot::kBlocks + Slot::line() * Slot::kWarpBlocks + block % Slot::kWarpBlocks) *
             int(kPackedBlock);
    };
    if (rms) {
#pragma unroll 1
      for (int block = first_block; block < blocks; ++block) {
        const int at = value_of(block) + lane * 8;
        const T* const from = static_cast<const T*>(p.norm.weight);
        if (lane < 16) copy_async(norm + block * 256 + lane * 16, at < width ? from + at : from, at < width);
      }
    }
    wait_for_input();
#pragma unroll 1
    for (int block = first_block; block < blocks; ++block) {
      const int first = value_of(block) + (kColumns == 4 ? g / 4 * int(kSubBlock) : 0) + q * 8;
      const int m = kColumns == 4 ? g % 4 : g;
      const T* const from = static_cast<const T*>(p.x) + int64_t(m) * width + first;
#pragma unroll
      for (int unit = 0; unit < kBlockUnits; ++unit) {
        const int offset = unit / kTiles * kTogether * int(kSubBlock);
        const bool present = first + offset < width && m + unit % kTiles * 8 < p.m;
        copy_async(place(block * kBlockUnits + unit),
                   present ? from + (offset + (unit % kTiles ? 8 * width : 0)) : p.x, present);
      }
    }
    commit_copies();
    wait_for_copies<0>();
    __syncwarp();  // weights that other lanes asked for

    // Sub-blocks or pairs of them, whose units of all tiles follow each other.
    const int first_sub_block = first_block * kOfBlock, sub_blocks = blocks * kOfBlock;
    Two<T> most_of_two[kTiles] = {}, most_of_weight = {};
    float square[kTiles][2][4] = {};
#pragma unroll 2
    for (int sub_block = first_sub_block; sub_block < sub_blocks; ++sub_block) {
      if (rms) keep_largest(most_of_weight, weight_of(sub_block));
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const uint4 x = *place(sub_block * kTiles + t);
        keep_largest(most_of_two[t], x);
        if (rms) {  // the diagonals, of the first rows and of the last
          mma<T>(square[t][0], x.x, x.y, x.z, x.w, x.x, x.z);
          mma<T>(square[t][1], x.x, x.y, x.z, x.w, x.y, x.w);
        }
      }
    }
    const auto larger = [](const Two<T>& two) { return fmaxf(to_float(two.x), to_float(two.y)); };
    // Not below 1: x alone must not become too large either.
    const float most_weight = rms ? fmaxf(warp_max(larger(most_of_weight)) + p.norm.weight_offset, 1.f) : 1.f;
    float most[kTiles];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      most[t] = larger(most_of_two[t]);
      float sum = g % 2 ? square[t][0][1] + square[t][1][3] : square[t][0][0] + square[t][1][2];
      if (q != g / 2) sum = 0.f;
#pragma unroll
      for (int offset = 1; offset <= (kColumns == 4 ? 16 : 2); offset *= offset == 2 ? 8 : 2) {
        most[t] = fmaxf(most[t], __shfl_xor_sync(kAllLanes, most[t], offset));
        if (rms) sum += __shfl_xor_sync(kAllLanes, sum, offset);
      }
      most[t] *= most_weight;
      const int m = kColumns == 4 ? g % 4 : t * 8 + g;
      if (Slot::kRowWarps > 1 && q == 0) largest[(threadIdx.x / kWarpSize) * 16 + m] = most[t];
      if (rms && q == 0 && m < p.m) squares[m] = sum;
    }
    if constexpr (Slot::kRowWarps > 1) sync_line();  // largest of all its warps
    int exponent[kTiles];                            // of what x is multiplied by
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const int m = kColumns == 4 ? g % 4 : t * 8 + g;
      if constexpr (Slot::kRowWarps > 1) {
#pragma unroll
        for (int w = 0; w < Slot::kRowWarps; ++w)
          most[t] = fmaxf(most[t], largest[(w * kLines + Slot::line()) * 16 + m]);
      }
      // The largest comes to lie below 2^15, or x is multiplied by as much as float16 has.
      const int of_most = int(__float_as_uint(most[t]) >> 23) - 127;
      exponent[t] = std::is_same_v<T, __half> ? min(max(14 - of_most, -14), 30) : min(14 - of_most, 126);
      if (q == 0 && m < p.m) undo[m] = __uint_as_float(unsigned(127 - exponent[t]) << 23);
    }
    float over[kTiles][4] = {};
#pragma unroll 2
    for (int sub_block = first_sub_block; sub_block < sub_blocks; ++sub_block) {
      uint4 weight = {};
      if (rms) weight = weight_of(sub_block);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        uint4* const at = place(sub_block * kTiles + t);
        const uint4 made = operand_of(*at, rms, weight, p.norm, exponent[t]);
        *at = made;
        if constexpr (kWhole) {
          // x comes as many times as quants have in excess, or each of the zero; see Quants.
          constexpr uint32_t kLow = kExcess<kFormat> * 0x00010001u;
          constexpr uint32_t kHigh = kBits<kFormat> == 4 ? kLow << 4 : kLow;
          mma<__half>(over[t], kLow, kLow, kHigh, kHigh, made.x, made.y);
          mma<__half>(over[t], kLow, kLow, kHigh, kHigh, made.z, made.w);
          if (kEachSubBlock || sub_block % kOfBlock == kOfBlock - 1) {
            store_excess(kEachSubBlock ? sub_block : sub_block / kOfBlock, t, over[t]);
#pragma unroll
            for (int i = 0; i < 4; ++i) over[t][i] = 0.f;
          }
        }
      }
    }
    sync_line();
    if constexpr (kWhole && kEachSubBlock) {
#pragma unroll 1
      for (int piece = Slot::row_warp(); piece < end - begin; piece += Slot::kRowWarps)
        split_excess<kColumns>(reinterpret_cast<float*>(steps + piece * kSpanSteps));
      if constexpr (Slot::kRowWarps > 1) sync_line();  // all of it, for all of its warps
    }
  }

 private:
  // All warps of this line meet.
  static __device__ __forceinline__ void sync_line() {
    if constexpr (Slot::kRowWarps > 1) {
      sync_some(3 + Slot::line(), Slot::kRowWarps * kWarpSize);
    } else {
      __syncwarp();
    }
  }
  __device__ __forceinline__ uint4* place(int unit) const {
    return operands + unit * kWarpSize + int(threadIdx.x) % kWarpSize;
  }
  // Returns the weights of a unit's sub-block, or of the lane's of two.
  __device__ __forceinline__ uint4 weight_of(int sub_block) const {
    const int lane = threadIdx.x % kWarpSize;
    return *reinterpret_cast<const uint4*>(norm + sub_block * kTogether * 64 +
                                           (kColumns == 4 ? lane / 16 * 64 : 0) + lane % 4 * 16);
  }

  static __device__ __forceinline__ Two<T> two_of(uint32_t bits) { return *reinterpret_cast<Two<T>*>(&bits); }
  static __device__ __forceinline__ void keep_largest(Two<T>& most, const uint4& x) {
    most = __hmax2(most, __hmax2(__hmax2(__habs2(two_of(x.x)), __habs2(two_of(x.y))),
                                 __hmax2(__habs2(two_of(x.z)), __habs2(two_of(x.w)))));
  }

  static __device__ __forceinline__ uint4 operand_of(const uint4& x, bool rms, const uint4& weight,
                                                     const GemvNorm& norm, int exponent) {
    const uint32_t words[4] = {x.x, x.y, x.z, x.w}, weights[4] = {weight.x, weight.y, weight.z, weight.w};
    uint32_t made[4];
    if constexpr (std::is_same_v<T, __half>) {  // rounded once: a power of two changes no bits
      const __half2 factor = power_of_two(min(exponent, 15)), more = power_of_two(max(exponent - 15, 0));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        __half2 pair = __hmul2(__hmul2(two_of(words[i]), factor), more);
        if (rms) pair = weighted<T>(pair, two_of(weights[i]), norm.offset_mask);
        made[i] = *reinterpret_cast<const uint32_t*>(&pair);
      }
    } else {
      const float factor = __uint_as_float(unsigned(127 + exponent) << 23);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float2 pair = unpack2(words[i], T());
        if (rms) {
          const float2 of_weight = unpack2(weights[i], T());
          pair.x *= of_weight.x + norm.weight_offset, pair.y *= of_weight.y + norm.weight_offset;
        }
        made[i] = pack2(pair.x * factor, pair.y * factor, __half());
      }
    }
    return as_operand<kFormat, kCenters<T, kFormat>>(made);
  }

  // A unit's sums in a lane's two columns, or those of a block.
  __device__ __forceinline__ void store_excess(int at, int t, const float (&over)[4]) const {
    const int lane = threadIdx.x % kWarpSize, q = lane % 4;
    float2 sum = make_float2(-over[0], -over[1]);
    int column = t * 8 + 2 * q;
    if constexpr (kColumns == 4) {
      if constexpr (kEachSubBlock) {  // [sub-block][column] all the same
        at *= 2;
      } else {
        sum.x += __shfl_xor_sync(kAllLanes, sum.x, 2);  // the other sub-blocks
        sum.y += __shfl_xor_sync(kAllLanes, sum.y, 2);
      }
    }
    if (lane < (kColumns == 4 && !kEachSubBlock ? 2 : 4))
      reinterpret_cast<float2*>(steps)[(at * kColumns + column) / 2] = sum;
  }
};

}  // namespace hf_fastpath
