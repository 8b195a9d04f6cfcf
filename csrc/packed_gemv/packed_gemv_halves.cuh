// One row of x beside quants that are floats or places in a table, as operands of tensor cores: float16,
// times a power of two for every block.
#pragma once

#include "packed_gemv/packed_gemv_row.cuh"

namespace hf_fastpath {

// A warp's blocks of x in shared memory: of a span, both blocks' [4 sub-blocks][4 q][8]. All columns of B are
// the same, and so are a lane's and its quad's sums, of which the sum is taken: steps are a quarter.
template <class T, PackedFormat kFormat>
struct HalfX : RowX<T, kFormat, HalfX<T, kFormat>> {
  using Base = RowX<T, kFormat, HalfX<T, kFormat>>;
  using Base::Base, Base::kSpanBytes, Base::kTogether, Base::operands, Base::steps;
  static constexpr int kBlockBytes = kSpanBytes / 2;

  struct Operand {
    uint4 of_sub_block[kSubBlocks];
    float step;

    __device__ __forceinline__ Operand(const HalfX& x, int at) : step(__int_as_float(x.steps[at * 4].x)) {
      const uint32_t from = shared_address(x.operands) + at * kBlockBytes + threadIdx.x % 4 * 16;
#pragma unroll
      for (int s = 0; s < int(kSubBlocks); ++s) of_sub_block[s] = load_shared(from + s * 64);
    }
  };

  // Does what ByteX::add does.
  template <class Reader>
  static __device__ __forceinline__ void add(const Operand& x, const Reader& reader, const TileRows& rows,
                                             PackedAccumulators<1>& accumulators) {
    BlockWords<kFormat> words;
    words.load(reader, rows, 0);
    float c[2][4] = {};  // of two chains
#pragma unroll
    for (int s = 0; s < int(kSubBlocks); ++s) {
      uint32_t a[2][4];
      words.template operands<false>(a, s, {0, 0});
      const uint4& b = x.of_sub_block[s];
      mma<__half>(c[0], a[0][0], a[0][1], a[0][2], a[0][3], b.x, b.y);
      mma<__half>(c[1], a[1][0], a[1][1], a[1][2], a[1][3], b.z, b.w);
    }
    const LineScales<kFormat> scales(reader, rows, 0, 1);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float step = x.step;
      if constexpr (!Traits<kFormat>::kScalesSums) step *= scales.of(h, 0);
      accumulators[0][2 * h] = fmaf(step, c[0][2 * h] + c[1][2 * h], accumulators[0][2 * h]);
    }
  }

  // Makes float16 of what a lane has of spans from `first` on.
  __device__ __forceinline__ void store(int first, int spans, const float (&values)[kTogether][8]) const {
    const int lane = threadIdx.x % kWarpSize;
    uint32_t bits[kTogether];
    Base::template find_largest<16>(values, bits);
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int span = min(first + i, spans - 1);
      const float factor = Base::factor_of(bits[i]);
      uint32_t pairs[4];
#pragma unroll
      for (int e = 0; e < 4; ++e)
        pairs[e] = pack2(values[i][2 * e] * factor, values[i][2 * e + 1] * factor, __half());
      *reinterpret_cast<uint4*>(operands + span * kSpanBytes + lane * 16) =
          make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      if (lane % 4 == 0)
        steps[span * 8 + lane / 4].x =
            __float_as_int(Base::step_of(bits[i]) * (0.25f * kUndoQuants<kFormat, true>));
    }
  }
};

// The same beside a table, whose places take four bits: two blocks at a time, and halves of a block have
// scales. Both values of a byte are looked up at once, in shared memory in front of the ring, where each lane
// has a table in a bank of its own: one load, and two instructions for its address. Permutations
// (packed_table.cuh) take three instructions a value, of which an SM has no time for more than a third of R
// (H200: 31 % of it over all products of a 7B).
template <class T, PackedFormat kFormat>
struct TableX : HalfX<T, kFormat> {
  using Base = HalfX<T, kFormat>;
  using Base::kBlockBytes;

  uint32_t table;  // this lane's, [byte] of two float16, kWarpSize * 4 bytes apart

  __device__ __forceinline__ TableX(char* ring, const PackedPlan& plan, int warp, int spans, int m)
      : Base(ring, plan, warp, spans, m),
        table(shared_address(ring) - kPairTableBytes + threadIdx.x % kWarpSize * 4) {
    static_assert(kRingConsumers == 256, "a thread a byte");
    const int byte = threadIdx.x;
    uint32_t pairs[4];
    table_pairs<kFormat>(byte, pairs);
    auto* const row = reinterpret_cast<uint4*>(ring - kPairTableBytes + byte * (kWarpSize * 4));
#pragma unroll
    for (int i = 0; i < 8; ++i) row[(i + byte) % 8] = make_uint4(pairs[0], pairs[0], pairs[0], pairs[0]);
    sync_some(1, kRingConsumers);
  }

  struct Operand {
    uint32_t of_lane;
    const int2* steps;
    uint32_t table;

    __device__ __forceinline__ Operand(const TableX& x, int at)
        : of_lane(shared_address(x.operands) + at * x.kSpanBytes + threadIdx.x % 4 * 16),
          steps(x.steps + at * 8),
          table(x.table) {}

    // The values of a word's i-th byte.
    __device__ __forceinline__ uint32_t pair(uint32_t word, int i) const {
      uint32_t value;
      asm volatile("ld.shared.u32 %0, [%1];"
                   : "=r"(value)
                   : "r"(__byte_perm(word, 0, 0x4440 + i) * (kWarpSize * 4) + table));
      return value;
    }
  };

  template <class Reader>
  static __device__ __forceinline__ void add(const Operand& x, const Reader& reader, const TileRows& rows,
                                             PackedAccumulators<1>& accumulators) {
#pragma unroll 1
    for (int block = 0; block < 2; ++block) {
      BlockWords<kFormat> words;
      words.load(reader, rows, block);
      const float step = __int_as_float(x.steps[block * 4].x);
      const LineScales<kFormat> scales(reader, rows, block, 1);
      float c[4] = {};
#pragma unroll
      for (int s = 0; s < int(kSubBlocks); ++s) {
        uint32_t a[2][4];
#pragma unroll
        for (int i = 0; i < 8; ++i) {  // a product takes two bytes of each row
          const int byte = i / 2, h = i % 2;
          a[byte / 2][h + byte % 2 * 2] = x.pair(words.word[h][0][s], byte);
        }
        const uint4 b = load_shared(x.of_lane + block * kBlockBytes + s * 64);
        mma<__half>(c, a[0][0], a[0][1], a[0][2], a[0][3], b.x, b.y);
        mma<__half>(c, a[1][0], a[1][1], a[1][2], a[1][3], b.z, b.w);
        if (s % 2 == 0) continue;
#pragma unroll
        for (int h = 0; h < 2; ++h)
          accumulators[0][2 * h] = fmaf(scales.of(h, s) * step, c[2 * h], accumulators[0][2 * h]);
#pragma unroll
        for (int i = 0; i < 4; ++i) c[i] = 0.f;
      }
    }
  }
};

}  // namespace hf_fastpath
