// One row of x beside quants that are whole numbers, as operands of tensor cores that multiply bytes: x is
// two bytes times a power of two for every sub-block.
#pragma once

#include "packed_gemv/packed_gemv_row.cuh"

namespace hf_fastpath {

// A warp's blocks of x in shared memory. Columns of B are sub-blocks by parts: of a lane's column g,
// sub-block g / 2 of the block (or every other one of two blocks) and its high or low byte; a product with
// the words of one sub-block has zeros in the columns of others, so that all go into the same accumulators. A
// lane of a quad ends up with those of its own sub-block, both parts. Operands of a span: 4-bit [4
// sub-blocks][2 parts][4 q][2 sub-blocks][2 planes][4], else for both blocks [4 sub-blocks][2 parts][4 q][8].
template <class T, PackedFormat kFormat>
struct ByteX : RowX<T, kFormat, ByteX<T, kFormat>> {
  using Base = RowX<T, kFormat, ByteX<T, kFormat>>;
  using Base::Base, Base::kSpanBytes, Base::kTogether, Base::operands, Base::steps;
  static constexpr bool kNibbles = kBits<kFormat> == 4;                      // two blocks at a time, else one
  static constexpr int kPart = 256;                                          // high bytes are worth
  static constexpr bool kZeroOfEach = Traits<kFormat>::kZerosPerBlock == 4;  // sub-block

  // A lane's columns of B for a piece, which it may use for several tiles.
  struct Operand {
    static constexpr int kWords = kNibbles ? 4 : 2;
    uint32_t of_sub_block[4][kWords];  // zeros but for the lane's own sub-block
    int4 steps;  // and excesses, of the sub-blocks whose accumulators the lane ends up with

    __device__ __forceinline__ Operand(const ByteX& x, int at) {
      const int lane = threadIdx.x % kWarpSize, q = lane % 4;
      uint32_t word[4] = {};
      if constexpr (kNibbles) {
        const uint4 raw = load_shared(shared_address(x.operands) + at * kSpanBytes + lane * 16);
        word[0] = raw.x, word[1] = raw.y, word[2] = raw.z, word[3] = raw.w;
        steps = reinterpret_cast<const int4*>(x.steps + at * 8)[q];
      } else {
        const uint2 raw = *reinterpret_cast<const uint2*>(x.operands + at * (kSpanBytes / 2) + lane * 8);
        word[0] = raw.x, word[1] = raw.y;
        steps.x = x.steps[at * 4 + q].x, steps.y = x.steps[at * 4 + q].y;
      }
#pragma unroll
      for (int s = 0; s < 4; ++s)
#pragma unroll
        for (int i = 0; i < kWords; ++i) of_sub_block[s][i] = lane / 8 == s ? word[i] : 0;
    }
  };

  // Adds the products of what the reader holds. A lane's accumulators, of rows g and g + 8, are over the
  // sub-blocks of its q.
  template <class Reader>
  static __device__ __forceinline__ void add(const Operand& x, const Reader& reader, const TileRows& rows,
                                             PackedAccumulators<1>& accumulators) {
    const int q = threadIdx.x % 4;
    if constexpr (kNibbles) {
      BlockWords<kFormat> words[2];
      words[0].load(reader, rows, 0);
      words[1].load(reader, rows, 1);
      const uint32_t two[2] = {reader.two_scales(rows, 0), reader.two_scales(rows, 1)};
      int zero[2][2] = {{1, 1}, {1, 1}};  // of both rows, of an even and an odd sub-block
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if constexpr (kZeroOfEach) {
          const int both = reader.two_zeros(rows, h);
          zero[h][0] = both & 255, zero[h][1] = both >> 8;
        } else if constexpr (Traits<kFormat>::kHasZeros) {
          zero[h][0] = zero[h][1] = reader.zero(rows, h, q / 2);
        }
      }
      int low[2][4] = {}, high[2][4] = {};  // of even and of odd sub-blocks
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        const auto &first = x.of_sub_block[2 * block], &second = x.of_sub_block[2 * block + 1];
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const auto& word = words[block].word;
          const uint32_t a[4] = {word[0][0][odd], word[1][0][odd], word[0][0][odd + 2], word[1][0][odd + 2]};
          constexpr uint32_t kLow = 0x0f0f0f0fu, kHigh = 0xf0f0f0f0u;
          mma_bytes<false>(low[odd], a[0] & kLow, a[1] & kLow, a[2] & kLow, a[3] & kLow, first[2 * odd],
                           second[2 * odd]);
          mma_bytes<false>(high[odd], a[0] & kHigh, a[1] & kHigh, a[2] & kHigh, a[3] & kHigh,
                           first[2 * odd + 1], second[2 * odd + 1]);
        }
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 scale = unpack2(two[h], __half());
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const int top = low[odd][2 * h] * 16 + high[odd][2 * h];
          const int excess = (odd ? x.steps.w : x.steps.y) * zero[h][odd];
          const int sum = top * kPart + (low[odd][2 * h + 1] * 16 + high[odd][2 * h + 1] + excess);
          const float step = __int_as_float(odd ? x.steps.z : x.steps.x);
          float& to = accumulators[0][2 * h];
          to = fmaf((odd ? scale.y : scale.x) * step, static_cast<float>(sum), to);
        }
      }
    } else {
      BlockWords<kFormat> words;
      words.load(reader, rows, 0);
      const auto& word = words.word;
      int c[4] = {};
#pragma unroll
      for (int s = 0; s < int(kSubBlocks); ++s) {
        mma_bytes<Traits<kFormat>::kIsSigned>(c, word[0][0][s], word[1][0][s], word[0][1][s], word[1][1][s],
                                              x.of_sub_block[s][0], x.of_sub_block[s][1]);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float2 of_sub_block = make_float2(1.f, 1.f);
        if constexpr (!Traits<kFormat>::kScalesSums) {
          const uint2 scales = reader.scales(rows, h, 0);
          of_sub_block = unpack2(Traits<kFormat>::kEachSubBlock && q >= 2 ? scales.y : scales.x, __half());
          if (Traits<kFormat>::kEachSubBlock && q % 2) of_sub_block.x = of_sub_block.y;
        }
        int sum = c[2 * h] * kPart + c[2 * h + 1];
        if constexpr (kZeroOfEach) sum += x.steps.y * (reader.zero(rows, h, 0) >> 8 * q & 255);
        float& to = accumulators[0][2 * h];
        to = fmaf(of_sub_block.x * __int_as_float(x.steps.x), static_cast<float>(sum), to);
      }
    }
  }

  // Makes bytes of what a lane has of spans from `first` on.
  __device__ __forceinline__ void store(int first, int spans, const float (&values)[kTogether][8]) const {
    const int lane = threadIdx.x % kWarpSize, sub_block = lane / 4, q = lane % 4;  // of a span's two blocks
    uint32_t bits[kTogether];
    Base::template find_largest<4>(values, bits);
    int total[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const float factor = Base::factor_of(bits[i]);
      constexpr float kWhole = 0x1.8p23f + kPart / 2;
      uint32_t
          whole[8];  // in the last 16 bits the value and kPart / 2: its high byte, and its low one and 128
      uint32_t sum = 0;
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        whole[e] = __float_as_uint(fmaf(values[i][e], factor, kWhole));
        sum += whole[e];
      }
      total[i] = static_cast<int>(sum - 8 * 0x4b400080u);  // bits of kWhole
      char* const to =
          operands + min(first + i, spans - 1) * kSpanBytes +
          (kNibbles ? (sub_block / 2 * 8 + q) * 16 + sub_block % 2 * 8 : (sub_block * 8 + q) * 8);
      uint32_t parts[2][2];  // high and low bytes: of even and odd values for nibbles, else of the first and
                             // last four
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        constexpr int kStep = kNibbles ? 2 : 1;
        const uint32_t* four = whole + (kNibbles ? j : 4 * j);
        const uint32_t low = __byte_perm(four[0], four[kStep], 0x5140),
                       high = __byte_perm(four[2 * kStep], four[3 * kStep], 0x5140);
        parts[0][j] = __byte_perm(low, high, 0x7632);
        parts[1][j] = __byte_perm(low, high, 0x5410) ^ 0x80808080u;
      }
#pragma unroll
      for (int part = 0; part < 2; ++part)
        *reinterpret_cast<uint2*>(to + part * (kNibbles ? 64 : 32)) =
            make_uint2(parts[part][0], parts[part][1]);
    }
#pragma unroll
    for (int offset = 1; offset <= 2; offset *= 2)
#pragma unroll
      for (int i = 0; i < kTogether; ++i) total[i] += __shfl_xor_sync(kAllLanes, total[i], offset);
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const float step = Base::step_of(bits[i]) * (kNibbles ? 1.f / 16 : 1.f);
      // or one for each of the zero; in units of low halves of bytes
      constexpr int kOffset =
          -(kNibbles ? 16 : 1) * (Traits<kFormat>::kHasZeros ? 1 : Traits<kFormat>::kZero);
      if (q == 0)
        steps[min(first + i, spans - 1) * 8 + sub_block] =
            make_int2(__float_as_int(step), total[i] * kOffset);
    }
  }
};

}  // namespace hf_fastpath
