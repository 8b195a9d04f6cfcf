// What: one to sixteen x rows times a quantized matrix, with everything around it: an RMS norm in front,
// bias,
//   activation, residual, the gated pair, or rotation and append to the KV cache behind.
// Work split: one or two blocks an SM, each a range of consecutive output features (or pairs of them), in
// tiles
//   of 16 weight rows. A tile's quants come through a ring of slots in shared memory, pieces of kPieceBytes a
//   row with their scales and zeros, of which a warp fetches as many as fit before the kernel in front is
//   complete. Eight warps compute, each its blocks of every piece: quants become float16 (one or two
//   instructions for two of them) and are A of mma.m16n8k16, x is B, prepared by each warp for its own blocks
//   in shared memory. Sums over warps wait for one barrier a tile.
//   x is float16 times a power of two for the warp's part of a row; a float32 x is two columns, high and low
//   part. Quants are whole numbers of float16's smallest subnormal: bits of a mantissa, no arithmetic. What
//   all quants have in excess (8 of int4_g32, 128 of int8, a zero point) is taken off by the sums of x that
//   the groups' sums start from. x that is too long for its part of shared memory comes in phases: all tiles
//   over some pieces of k, then over the next.
// Traffic: quants, scales and zeros once, plus m * k * sizeof(T) of x and the norm's weight a block out of
// L2. Roofline: read bandwidth.
#pragma once

#include "gemv/gemv_ring.cuh"
#include "packed_gemv/packed_gemv.h"

namespace hf_fastpath {

constexpr int kTileRows = 16;
constexpr int kLineBytes = 128;
constexpr int kLines = 8;  // of a weight row in a slot
constexpr int kPieceBytes = kLines * kLineBytes;
constexpr float kQuantUnit = 0x1p-24f;  // float16's smallest subnormal

template <PackedForm kForm>
constexpr int kBits = bits_of(kForm);

// How a format lies in a slot: groups of PackedPlan::together rows, of each group kLines times 128 bytes of
// every row, 16-byte pieces in the order of swizzled(); then their scales and zeros.
template <PackedForm kForm>
struct PackedSlot {
  static constexpr int kBlockBytes = int(kPackedBlock) * kBits<kForm> / 8;
  static constexpr int kBlocks = kPieceBytes / kBlockBytes;  // of a piece
  static constexpr int kWarpBlocks = kBlocks / kRingWarps;   // of those, a warp's: 128 bytes
  static constexpr int kScalesPerBlock = kForm == PackedForm::kFp8       ? 0
                                         : kForm == PackedForm::kInt4G32 ? 4
                                                                         : 1;
  static constexpr int kScaleBytes = kBlocks * kScalesPerBlock * 2;  // of a row
  static constexpr bool kSwizzlesScales = kScaleBytes == kLineBytes;
  static constexpr int kZeroBytes = kForm == PackedForm::kInt4 ? kBlocks : 0;
  static constexpr int kSums = kScalesPerBlock;  // of x, a block

  // Row g of a lane's quad: neighbors in g are rows whose pieces lie in different halves of 128 bytes.
  __device__ static __forceinline__ int row_of(int g) { return kBits<kForm> == 4 ? g / 2 + g % 2 * 4 : g; }
};

// How a launch runs over a shape.
struct PackedPlan {
  RingPlan ring;  // units, share and larger in groups
  PackedMatrix matrix;
  int together;    // rows of a group: they follow each other in the matrix, and are fetched as one,
  int copy_lines;  // as many lines at a time: all, or one
  int x_width;  // of a row of x and of the norm's weight in memory: whole 16 bytes, aligned, zeros behind p.k
  int pieces;   // of a row
  int phase_pieces;                     // of a phase
  bool fetches_scales;                  // with the quants; else lanes load them from device memory
  int slot_bytes, scales_at, zeros_at;  // of a slot
  int scale_stride, zero_stride;        // of a group
  int x_at, sums_at, scratch_at, parts_at, dots_at;  // in shared memory, behind the ring
};

// How copies find a matrix: its quants as [lines of a row, rows, 128 bytes], or where rows are no whole lines
// as [rows, bytes of a row]; scales and zeros as [rows, groups].
struct PackedMaps {
  CUtensorMap quants, scales, zeros;
};

// Units [begin, end) of this block.
__device__ __forceinline__ void packed_range(const PackedPlan& plan, int& begin, int& end) {
  ring_range(plan.ring, begin, end);
  begin *= plan.together, end *= plan.together;
}

// Columns of B that a row of x takes: a float32 x is the sum of three float16 parts, the fourth column
// nothing.
template <class T>
constexpr int kXColumns = sizeof(T) == 4 ? 4 : 1;
template <class T>
constexpr int kXParts = sizeof(T) == 4 ? 3 : 1;
constexpr float kNextPart = 0x1p11f;  // a part's factor beside the one before

// The weight row of one half of a unit.
__device__ __forceinline__ int packed_row(const GemvParams& p, const RopeAppendParams& rope,
                                          const RingPlan& plan, int unit, int half) {
  if (plan.append) return pair_feature(rope, unit, half);
  return p.gated ? half * p.n + unit : unit;
}

// ---- quants
// -------------------------------------------------------------------------------------------------

// A float32 x keeps all bits only beside quants less their zero, which takes another instruction for two of
// them.
template <class T>
constexpr bool kCenters = sizeof(T) == 4;

// Pairs of A out of 32 bits of a row: kSteps products' two, low and high k. Centered they are quants less
// their zero, else in units of kQuantUnit and with what they have in excess; of fp8 2^-8 of the value.
template <PackedForm kForm, bool kCentered>
struct Quants {
  static constexpr int kSteps = kBits<kForm> == 4 ? 2 : 1;
  uint32_t pair[kSteps][2];

  __device__ __forceinline__ Quants(uint32_t word, int zero) {
    constexpr uint32_t kMagic = 0x64006400u;  // two times 1024, whose last bits are units
    if constexpr (kBits<kForm> == 4) {
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        pair[step][0] = word & 0x000f000fu;
        pair[step][1] = word & 0x00f000f0u;  // 16 times as much: x is 16 times less
        if constexpr (kCentered) {
          pair[step][0] = bits_of_half2(__hsub2(half2_of(pair[step][0] | kMagic), all_half2(1024.f + zero)));
          pair[step][1] = bits_of_half2(
              __hfma2(half2_of(pair[step][1] | kMagic), all_half2(0.0625f), all_half2(-64.f - zero)));
        }
        word >>= 8;
      }
    } else if constexpr (kForm == PackedForm::kInt8) {
      const uint32_t unsigned_bytes = word ^ 0x80808080u;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        pair[0][i] = __byte_perm(unsigned_bytes, 0, i == 0 ? 0x4140 : 0x4342);
        if constexpr (kCentered)
          pair[0][i] = bits_of_half2(__hsub2(half2_of(pair[0][i] | kMagic), all_half2(1024.f + 128.f)));
      }
    } else {  // sign, exponent and mantissa as float16 has them, whose exponent's bias is 8 more
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t bits = __byte_perm(word, 0, i == 0 ? 0x1404 : 0x3424);
        pair[0][i] = (bits & 0x80008000u) | (bits >> 1 & 0x3f803f80u);
      }
    }
  }

 private:
  static __device__ __forceinline__ __half2 half2_of(uint32_t bits) {
    return *reinterpret_cast<__half2*>(&bits);
  }
  static __device__ __forceinline__ uint32_t bits_of_half2(__half2 pair) {
    return *reinterpret_cast<uint32_t*>(&pair);
  }
  static __device__ __forceinline__ __half2 all_half2(float value) { return __float2half2_rn(value); }
};

// What a product is in units of.
template <PackedForm kForm, bool kCentered>
constexpr float kUndoQuants = kForm == PackedForm::kFp8 ? 0x1p8f
                              : kCentered               ? 1.f
                                                        : 1.f / kQuantUnit;

// ---- x
// ------------------------------------------------------------------------------------------------------

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

// A warp's blocks of x in shared memory: spans of two blocks, of which a lane prepares eight values.
template <class T, PackedForm kForm, int kColumns>
struct WarpX {
  using Slot = PackedSlot<kForm>;
  static constexpr int kSpanPieces = 2 / Slot::kWarpBlocks;

  uint4* operands;  // [spans][2][kStretches][kColumns][4]
  float* sums;      // [spans][2][kColumns][kSums]
  float* squares;   // [m], over all phases
  float* undo;      // [m], of a phase

  // Prepares the blocks of pieces [begin, end). `input_is_there`: called once the kernel in front is
  // complete.
  template <class InputIsThere>
  __device__ __forceinline__ void load(const GemvParams& p, const PackedPlan& plan, int begin, int end,
                                       bool is_first, InputIsThere input_is_there) const {
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, half = lane / 16;
    const int k = plan.x_width, spans = (end - begin + kSpanPieces - 1) / kSpanPieces;
    const bool rms = p.norm.kind == Norm::kRms;
    // The lane's first value of a span; not below k: there is none.
    const auto element = [&](int span) {
      if constexpr (Slot::kWarpBlocks == 2) {
        return ((begin + span) * Slot::kBlocks + 2 * warp + half) * int(kPackedBlock) + lane % 16 * 8;
      } else {
        const int piece = begin + 2 * span + half;
        return piece < end ? (piece * Slot::kBlocks + warp) * int(kPackedBlock) + lane % 16 * 8 : k;
      }
    };
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
    if (is_first) {
      wait_for_previous_kernel();
      input_is_there();
    }
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
            *place(span, m, 0) = as_operand<kForm, false>(scaled(found, 14 - exponent).words);
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
    if constexpr (Slot::kSums > 0 && !kCenters<T>) {
#pragma unroll 2
      for (int span = 0; span < spans; ++span) find_sums(span);
      __syncwarp();
    }
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

  // What quants of a span have in excess times x: a product with rows that are all alike.
  __device__ __forceinline__ void find_sums(int span) const {
    const int lane = threadIdx.x % kWarpSize, g = lane / 4, q = lane % 4;
    constexpr uint32_t kExcess = kForm == PackedForm::kInt8 ? 128 : kForm == PackedForm::kInt4G32 ? 8 : 1;
    constexpr uint32_t kLow = 0x80008000u | kExcess << 16 | kExcess;  // both negative, in units of quants
    constexpr uint32_t kHigh = kBits<kForm> == 4 ? 0x80008000u | kExcess << 20 | kExcess << 4 : kLow;
    const auto add = [&](float (&c)[4], const uint4& x) {
      mma<__half>(c, kLow, kLow, kHigh, kHigh, x.x, x.y);
      mma<__half>(c, kLow, kLow, kHigh, kHigh, x.z, x.w);
    };
    if constexpr (kColumns == 1) {  // columns of B are the span's eight stretches
      float c[4] = {};
      add(c, operands[span * 2 * int(kStretches) * 4 + lane]);
      if constexpr (Slot::kSums == 4) {
        if (g == 0) reinterpret_cast<float2*>(sums + span * 8)[q] = make_float2(c[0], c[1]);
      } else {
        float sum = c[0] + c[1];
        sum += __shfl_xor_sync(kAllLanes, sum, 1);
        if (g == 0 && q % 2 == 0) sums[span * 2 + q / 2] = sum;
      }
      return;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int t = 0; t < (kColumns + 7) / 8; ++t) {
        const int of_lane = kColumns >= 8 || g < kColumns ? t * 8 + g : 0, column = t * 8 + 2 * q;
        const int block = span * 2 + half;
        float c[4] = {};
#pragma unroll
        for (int s = 0; s < int(kStretches); ++s) {
          add(c, operands[((block * int(kStretches) + s) * kColumns + of_lane) * 4 + q]);
          if (Slot::kSums < 4 && s < 3) continue;
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if (g == 0 && column + i < kColumns)
              sums[(block * kColumns + column + i) * Slot::kSums + (Slot::kSums == 4 ? s : 0)] = c[i];
            c[i] = c[i + 2] = 0.f;
          }
        }
      }
  }
};

// ---- weights
// ------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint4 load_shared(uint32_t from) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(from));
  return value;
}

// A lane's rows of a tile, g and g + 8, in the matrix: for what is not fetched into the ring.
struct TileRows {
  int row[2];

  // Of tile rows [first, first + 16) of `rows`: those behind the last are the last.
  template <PackedForm kForm>
  __device__ __forceinline__ void find(const GemvParams& p, const RopeAppendParams& rope,
                                       const RingPlan& plan, int begin, int units, int first, int rows) {
    const int g = PackedSlot<kForm>::row_of(threadIdx.x % kWarpSize / 4);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = min(first + g + 8 * h, rows - 1), half = at >= units;
      row[h] = packed_row(p, rope, plan, begin + at - half * units, half);
    }
  }
};

// Scales of a block, the first in the lowest bits, and its zero, in device memory.
template <PackedForm kForm>
__device__ __forceinline__ uint2 scales_of(const PackedMatrix& matrix, int row, int block) {
  const uint16_t* from =
      matrix.scales + int64_t(row) * matrix.groups + block * PackedSlot<kForm>::kScalesPerBlock;
  if constexpr (kForm == PackedForm::kInt4G32) return __ldg(reinterpret_cast<const uint2*>(from));
  return make_uint2(__ldg(from), 0);
}
__device__ __forceinline__ int zero_of(const PackedMatrix& matrix, int row, int block) {
  return __ldg(matrix.zeros + int64_t(row) * matrix.groups + block);
}

#if HF_FASTPATH_HOPPER

// Where tensor copies with 128-byte swizzle put the 16 bytes at `offset` of shared memory.
__device__ __forceinline__ uint32_t swizzled(uint32_t offset) { return offset ^ (offset >> 7 & 7) << 4; }

template <PackedForm kForm>
__device__ __forceinline__ void packed_fetch(const GemvParams& p, const RopeAppendParams& rope,
                                             const PackedPlan& plan, const PackedMaps& maps, uint32_t ring,
                                             uint32_t full, uint32_t empty, int lane) {
  using Slot = PackedSlot<kForm>;
  int begin, end;
  packed_range(plan, begin, end);
  const int units = end - begin, rows = units * plan.ring.halves, together = plan.together;
  const int group_bytes =
      together * (kPieceBytes + (plan.fetches_scales ? Slot::kScaleBytes + Slot::kZeroBytes : 0));
  const uint64_t policy = read_once_policy();
  RingCursor at, oldest;
  int under_way = 0, fetched = 0;
#pragma unroll 1
  for (int phase = 0; phase < plan.pieces; phase += plan.phase_pieces)
#pragma unroll 1
    for (int first = 0; first < rows; first += kTileRows) {
      const int groups = min(kTileRows, rows - first) / together;
      const int first_of_lane = min(first + lane * together, rows - 1), half = first_of_lane >= units;
      const int row = packed_row(p, rope, plan.ring, begin + first_of_lane - half * units, half);
      const int last = min(phase + plan.phase_pieces, plan.pieces);
#pragma unroll 1
      for (int piece = phase; piece < last; ++piece) {
        const uint32_t barrier = full + 8 * at.slot;
        if (fetched >= plan.ring.slots) barrier_wait(empty + 8 * at.slot, at.parity ^ 1);
        if (under_way >= (fetched < plan.ring.slots ? plan.ring.in_flight : plan.ring.streaming)) {
          barrier_wait(full + 8 * oldest.slot, oldest.parity);
          oldest.advance(plan.ring.slots);
        } else {
          ++under_way;
        }
        ++fetched;
        const uint32_t slot = ring + at.slot * plan.slot_bytes;
        if (is_elected()) barrier_arrive_expect(barrier, groups * group_bytes);
#pragma unroll 1
        for (int group = 0; group < groups; ++group) {
          const int from = __shfl_sync(kAllLanes, row, group);
          if (is_elected()) {
#pragma unroll 1
            for (int line = 0; line < kLines; line += plan.copy_lines) {
              const int of_row = piece * kLines + line;
              copy_tile_to_shared(slot + (group * kLines + line) * together * kLineBytes, &maps.quants,
                                  plan.copy_lines == 1 ? of_row * (kLineBytes / 4) : 0, from,
                                  plan.copy_lines == 1 ? 0 : of_row, barrier, policy);
            }
            if (Slot::kScaleBytes > 0 && plan.fetches_scales) {
              copy_tile_to_shared(slot + plan.scales_at + group * plan.scale_stride, &maps.scales,
                                  piece * (Slot::kScaleBytes / 2), from, 0, barrier, policy);
              if (Slot::kZeroBytes > 0) {
                copy_tile_to_shared(slot + plan.zeros_at + group * plan.zero_stride, &maps.zeros,
                                    piece * Slot::kZeroBytes, from, 0, barrier, policy);
              }
            }
          }
        }
        at.advance(plan.ring.slots);
      }
    }
}

// A slot's bytes, for a lane: of its warp's blocks of its rows.
template <PackedForm kForm>
struct PackedReader {
  using Slot = PackedSlot<kForm>;
  const PackedPlan& plan;
  uint32_t ring;
  RingBarriers barriers;
  RingCursor at = {};
  uint32_t slot = 0, quants_at[2], scales_at[2], zeros_at[2];

  __device__ __forceinline__ PackedReader(const GemvParams&, const PackedPlan& plan, const char* ring,
                                          RingBarriers barriers)
      : plan(plan), ring(shared_address(ring)), barriers(barriers) {
    const int warp = threadIdx.x / kWarpSize, g = threadIdx.x % kWarpSize / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = Slot::row_of(g) + 8 * h, group = row / plan.together, of_group = row % plan.together;
      quants_at[h] = swizzled(group * plan.together * kPieceBytes + warp * plan.together * kLineBytes +
                              of_group * kLineBytes + q * (kBits<kForm> == 4 ? 16 : 32));
      const int scale = warp * Slot::kWarpBlocks * Slot::kScalesPerBlock * 2;
      const int of_scales = plan.scales_at + group * plan.scale_stride + of_group * Slot::kScaleBytes + scale;
      scales_at[h] = Slot::kSwizzlesScales ? swizzled(of_scales) : of_scales;
      zeros_at[h] =
          plan.zeros_at + group * plan.zero_stride + of_group * Slot::kZeroBytes + warp * Slot::kWarpBlocks;
    }
  }
  __device__ __forceinline__ void wait(const TileRows&, int) {
    barrier_wait(barriers.full + 8 * at.slot, at.parity);
    slot = ring + at.slot * plan.slot_bytes;
  }
  // 16 bytes of this warp's 128: the lane's i-th of its `block`.
  __device__ __forceinline__ uint4 quants(const TileRows&, int h, int block, int i) const {
    return load_shared(slot + (quants_at[h] ^ (kBits<kForm> == 4 ? block * 64 : i * 16)));
  }
  __device__ __forceinline__ uint2 scales(const TileRows& rows, int h, int block) const {
    if (!plan.fetches_scales) return scales_of<kForm>(plan.matrix, rows.row[h], first_block() + block);
    uint2 found = {};
    if constexpr (Slot::kScalesPerBlock == 4) {
      asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                   : "=r"(found.x), "=r"(found.y)
                   : "r"(slot + scales_at[h] + 8 * block));
    } else {
      uint16_t bits;
      asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(slot + scales_at[h] + 2 * block));
      found.x = bits;
    }
    return found;
  }
  __device__ __forceinline__ int zero(const TileRows& rows, int h, int block) const {
    if (!plan.fetches_scales) return zero_of(plan.matrix, rows.row[h], first_block() + block);
    uint32_t found;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(found) : "r"(slot + zeros_at[h] + block));
    return static_cast<int>(found);
  }
  __device__ __forceinline__ void release(uint32_t bits) {
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) {
      barrier_arrive(behind_reads(barriers.empty + 8 * at.slot, bits, plan.ring.zero));
    }
    at.advance(plan.ring.slots);
  }
  int piece = 0;
  __device__ __forceinline__ int first_block() const {
    return piece * Slot::kBlocks + int(threadIdx.x) / kWarpSize * Slot::kWarpBlocks;
  }
};

template <PackedForm kForm, class Compute>
__device__ __forceinline__ void run_packed(const GemvParams& p, const RopeAppendParams& rope,
                                           const PackedPlan& plan, const PackedMaps& maps, const char* ring,
                                           Compute compute) {
  __shared__ __align__(8) uint64_t barriers[2][kMaxRingSlots];
  uint32_t full = shared_address(barriers[0]), empty = shared_address(barriers[1]);
  asm volatile("" : "+r"(full), "+r"(empty));  // kept, not found anew for every slot
  allow_next_kernel();
  if (threadIdx.x >= kRingConsumers) {
    const int lane = threadIdx.x % kWarpSize;
    if (lane < plan.ring.slots) {
      barrier_init(full + 8 * lane, 1);
      barrier_init(empty + 8 * lane, kRingWarps);
      barrier_init_done();
    }
    __syncwarp();
    arrive_some(2, kRingThreads);  // initialized barriers: this warp waits for nobody
    packed_fetch<kForm>(p, rope, plan, maps, shared_address(ring), full, empty, lane);
    return;
  }
  compute(RingBarriers{full, empty});
  trace(TracePoint::kEnd);
}

#else

// Straight from device memory.
template <PackedForm kForm>
struct PackedReader {
  using Slot = PackedSlot<kForm>;
  const GemvParams& p;
  const PackedPlan& plan;
  int piece = 0;

  __device__ __forceinline__ PackedReader(const GemvParams& p, const PackedPlan& plan, const char*,
                                          RingBarriers)
      : p(p), plan(plan) {}
  __device__ __forceinline__ void wait(const TileRows&, int) {}
  __device__ __forceinline__ uint4 quants(const TileRows& rows, int h, int block, int i) const {
    const char* of_row = static_cast<const char*>(p.segments[0].weight) +
                         int64_t(rows.row[h]) * plan.matrix.blocks * Slot::kBlockBytes;
    const int byte =
        (first_block() + block) * Slot::kBlockBytes + (threadIdx.x % 4 * (kBits<kForm> / 4) + i) * 16;
    return __ldcs(reinterpret_cast<const uint4*>(of_row + byte));
  }
  __device__ __forceinline__ uint2 scales(const TileRows& rows, int h, int block) const {
    return scales_of<kForm>(plan.matrix, rows.row[h], first_block() + block);
  }
  __device__ __forceinline__ int zero(const TileRows& rows, int h, int block) const {
    return zero_of(plan.matrix, rows.row[h], first_block() + block);
  }
  __device__ __forceinline__ void release(uint32_t) {}
  __device__ __forceinline__ int first_block() const {
    return piece * Slot::kBlocks + int(threadIdx.x) / kWarpSize * Slot::kWarpBlocks;
  }
};

template <PackedForm kForm, class Compute>
__device__ __forceinline__ void run_packed(const GemvParams&, const RopeAppendParams&, const PackedPlan&,
                                           const PackedMaps&, const char*, Compute compute) {
  compute(RingBarriers{});
}

#endif  // HF_FASTPATH_HOPPER

// ---- products
// -----------------------------------------------------------------------------------------------

template <int kColumns>
constexpr int kColumnTiles = (kColumns + 7) / 8;

template <int kColumns>
using PackedSums =
    float[2][kColumnTiles<kColumns>][2];  // rows g and g + 8; columns 2 q and 2 q + 1 of a tile

// A lane's words of a block, of rows g and g + 8: word s of 16 bytes is of stretch s.
template <PackedForm kForm>
struct BlockWords {
  static constexpr int kLoads = kBits<kForm> / 4;
  uint32_t word[2][kLoads][4];

  __device__ __forceinline__ void load(const PackedReader<kForm>& reader, const TileRows& rows, int block) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const uint4 raw = reader.quants(rows, h, block, i);
        word[h][i][0] = raw.x, word[h][i][1] = raw.y, word[h][i][2] = raw.z, word[h][i][3] = raw.w;
      }
  }

  // c += the products of a stretch and x. `zero`: of both rows, for centered quants.
  template <bool kCentered = false>
  __device__ __forceinline__ void add(float (&c)[4], int stretch, const uint4& x,
                                      const int (&zero)[2] = {}) const {
    uint32_t a[2][2][2];  // rows; the two products; low and high k
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if constexpr (kLoads == 1) {
        const Quants<kForm, kCentered> quants(word[h][0][stretch], zero[h]);
        a[h][0][0] = quants.pair[0][0], a[h][0][1] = quants.pair[0][1];
        a[h][1][0] = quants.pair[1][0], a[h][1][1] = quants.pair[1][1];
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const Quants<kForm, kCentered> quants(word[h][i][stretch], zero[h]);
          a[h][i][0] = quants.pair[0][0], a[h][i][1] = quants.pair[0][1];
        }
      }
    }
    mma<__half>(c, a[0][0][0], a[1][0][0], a[0][0][1], a[1][0][1], x.x, x.y);
    mma<__half>(c, a[0][1][0], a[1][1][0], a[0][1][1], a[1][1][1], x.z, x.w);
  }
};

// Adds a block's products. `block`: of this warp's in the piece; `of_x`: of those in the phase.
template <class T, PackedForm kForm, int kColumns>
__device__ __forceinline__ void add_block(const PackedReader<kForm>& reader, const TileRows& rows,
                                          const WarpX<T, kForm, kColumns>& x, int block, int of_x,
                                          PackedSums<kColumns>& sums) {
  using Slot = PackedSlot<kForm>;
  const int lane = threadIdx.x % kWarpSize, g = lane / 4, q = lane % 4;
  constexpr int kTiles = kColumnTiles<kColumns>, kGroups = kForm == PackedForm::kInt4G32 ? 4 : 1;
  constexpr bool kFloats = kForm == PackedForm::kFp8;
  BlockWords<kForm> words;
  words.load(reader, rows, block);
  constexpr bool kCentered = kCenters<T>;
  float scale[2][kGroups];
  int zero[2] = {8, 8};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if constexpr (!kFloats) {
      const uint2 raw = reader.scales(rows, h, block);
      const float2 low = unpack2(raw.x, __half());
      scale[h][0] = low.x;
      if constexpr (kGroups == 4) {
        const float2 high = unpack2(raw.y, __half());
        scale[h][1] = low.y, scale[h][2] = high.x, scale[h][3] = high.y;
      }
    }
    if constexpr (kForm == PackedForm::kInt4) zero[h] = reader.zero(rows, h, block);
  }
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    // Columns that do not exist are others once more: nobody reads their sums.
    const uint4* operand =
        x.operands +
        (of_x * int(kStretches) * kColumns + (kColumns >= 8 || g < kColumns ? t * 8 + g : 0)) * 4 + q;
    const int column = kColumns >= 8 || 2 * q < kColumns ? t * 8 + 2 * q : 0;
    const float* of_column = x.sums + (of_x * kColumns + column) * Slot::kSums;
    float c[2][4] = {};  // of even and odd stretches
#pragma unroll
    for (int s = 0; s < int(kStretches); ++s) {
      words.template add<kCentered>(c[s % 2], s, load_shared(shared_address(operand + s * kColumns * 4)),
                                    zero);
      if constexpr (kGroups == 4) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float all = kCentered ? c[s % 2][i] : c[s % 2][i] + of_column[i % 2 * Slot::kSums + s];
          sums[i / 2][t][i % 2] = fmaf(scale[i / 2][s], all, sums[i / 2][t][i % 2]);
          c[s % 2][i] = 0.f;
        }
      }
    }
    if constexpr (kGroups == 1) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float all = c[0][i] + c[1][i];
        float& sum = sums[i / 2][t][i % 2];
        if constexpr (kFloats) {
          sum += all;
        } else if constexpr (kCentered) {
          sum = fmaf(scale[i / 2][0], all, sum);
        } else {
          const float excess = of_column[i % 2];
          all = kForm == PackedForm::kInt4 ? fmaf(float(zero[i / 2]), excess, all) : all + excess;
          sum = fmaf(scale[i / 2][0], all, sum);
        }
      }
    }
  }
}

#if HF_FASTPATH_HOPPER

// The same for a warp's two blocks of kInt4G32 and one column: each lane's operand is of another stretch of
// them, column n of B being stretch n, and of each product the column of its own stretch counts. A lane of a
// quad ends up with the sums over two stretches; `operand`, `x_sums`: its own, of x.
__device__ __forceinline__ void add_two_blocks(const PackedReader<PackedForm::kInt4G32>& reader,
                                               uint32_t operand, uint32_t x_sums, float (&sums)[2]) {
  const int q = threadIdx.x % 4;
  BlockWords<PackedForm::kInt4G32> words[2];
  words[0].load(reader, {}, 0);
  words[1].load(reader, {}, 1);
  const uint4 x = load_shared(operand);
  float2 excess, scale[2];
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(excess.x), "=f"(excess.y) : "r"(x_sums));
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    uint32_t bits;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(bits) : "r"(reader.slot + reader.scales_at[h] + 4 * q));
    scale[h] = unpack2(bits, __half());
  }
  float c[8][4] = {};
#pragma unroll
  for (int n = 0; n < 8; ++n) words[n / 4].add(c[n], n % 4, x);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const auto own = [&](int at) {  // of stretch 2 q or the next
      const float first = q % 2 ? c[2 + at % 2][at] : c[at % 2][at];
      const float second = q % 2 ? c[6 + at % 2][at] : c[4 + at % 2][at];
      return q / 2 ? second : first;
    };
    sums[h] = fmaf(scale[h].x, own(2 * h) + excess.x, sums[h]);
    sums[h] = fmaf(scale[h].y, own(2 * h + 1) + excess.y, sums[h]);
  }
}

#endif

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
        reader.wait(tile, piece);
        reader.piece = piece;
        const int left = plan.matrix.blocks - reader.first_block();  // of this warp's and what follows
        if constexpr (kTwoBlocks) {  // that two are there and their scales in the ring, its launch has seen
                                     // to
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
