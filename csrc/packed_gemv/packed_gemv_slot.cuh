// How a launch of packed_gemv_ring.cuh runs over a shape, how a format lies in a slot of its ring, and its
// quants as operands of tensor cores.
#pragma once

#include "common/float8.cuh"
#include "gemv/gemv_ring.cuh"
#include "packed_gemv/packed_gemv.h"
#include "weights/packed_table.cuh"

namespace hf_fastpath {

constexpr int kMmaRows = 16;  // weight rows of a warp in a tile
constexpr int kLineBytes = 128;
constexpr float kQuantUnit = 0x1p-24f;  // float16's smallest subnormal

template <PackedFormat kFormat>
constexpr int kBits = Traits<kFormat>::kBits;

// How a format lies in a slot: groups of PackedPlan::together rows, of each group kLines times 128 bytes of
// every row, 16-byte pieces in the order of swizzled(); then their scales and zeros. A line of a row is for
// one warp: kLines warps share rows, the others have rows of their own.
template <PackedFormat kFormat, int kLines>
struct PackedSlot {
  static constexpr int kRowWarps = kRingWarps / kLines;
  static constexpr int kWeightRows = kRowWarps * kMmaRows;
  static constexpr int kPieceBytes = kLines * kLineBytes;  // of a weight row
  static constexpr int kBlockBytes = int(kPackedBlock) * kBits<kFormat> / 8;
  static constexpr int kBlocks = kPieceBytes / kBlockBytes;              // of a piece
  static constexpr int kWarpBlocks = kBlocks / kLines;                   // of those, a warp's: 128 bytes
  static constexpr int kScalesPerBlock = Traits<kFormat>::kScaleHalves;  // or halves of scales in float32
  // A row has so many. No copy takes less than 16 bytes, or starts between them (that is an illegal
  // instruction): of shorter pieces every other one is in the second half.
  static constexpr int kScaleBytes = kScalesPerBlock ? std::max(16, kBlocks * kScalesPerBlock * 2) : 0;
  static constexpr bool kSwizzlesScales = kScaleBytes > 16;
  static constexpr int kZerosPerBlock = Traits<kFormat>::kZerosPerBlock;
  static constexpr int kZeroBytes = kZerosPerBlock ? std::max(16, kBlocks* kZerosPerBlock) : 0;
  // Where a piece's first scale and zero lie in what is copied for it, in bytes.
  __device__ static __forceinline__ int scale_offset(int piece) {
    return piece * (kBlocks * kScalesPerBlock * 2) % 16;
  }
  __device__ static __forceinline__ int zero_offset(int piece) {
    return piece * (kBlocks * kZerosPerBlock) % 16;
  }

  __device__ static __forceinline__ int line() { return int(threadIdx.x) / kWarpSize % kLines; }
  __device__ static __forceinline__ int row_warp() { return int(threadIdx.x) / kWarpSize / kLines; }

  // Row g of a lane's quad: neighbors in g are rows whose pieces lie in different halves of 128 bytes.
  __device__ static __forceinline__ int row_of(int g) { return kBits<kFormat> == 4 ? g / 2 + g % 2 * 4 : g; }
};

// Whether a product makes several rows of x operands itself, in clusters (packed_gemv_lanes.cuh).
template <class T, int kColumns, bool kPrepared>
constexpr bool kTakesLanes = sizeof(T) == 2 && kColumns > 1 && kColumns <= 8 && !kPrepared;

// Lines of a row in a slot: in clusters half as many, so that fewer warps share a sum.
template <class T, int kColumns, bool kPrepared>
constexpr int kLinesOf = kTakesLanes<T, kColumns, kPrepared> ? 4 : 8;
template <int kLines>
constexpr bool kIsCluster = kLines == 4;

// How a launch runs over a shape.
struct PackedPlan {
  RingPlan ring;  // units, share and larger in groups
  PackedMatrix matrix;
  int together;    // rows of a group: they follow each other in the matrix, and are fetched as one,
  int copy_lines;  // as many lines at a time: all, or one
  int x_width;  // of a row of x and of the norm's weight in memory: whole 16 bytes, aligned, zeros behind p.k
  const char* prepared;  // x as packed_gemv_prepared.cuh leaves it, where the product takes that
  int ranks;             // blocks of a cluster, 1 or 2: they share rows, each takes a part of k
  int pieces;            // of a row
  int phase_pieces;      // of a phase
  bool fetches_scales;   // with the quants; else lanes load them from device memory
  int slot_bytes, scales_at, zeros_at;  // of a slot
  int scale_stride, zero_stride;        // of a group
  int x_at, sums_at, norm_at, scratch_at, partials_at, dots_at,
      received_at;  // in shared memory, behind the ring
};

// How copies find a matrix: its quants as [lines of a row, rows, 128 bytes], or where rows are no whole lines
// as [rows, bytes of a row]; scales and zeros as [rows, groups].
struct PackedMaps {
  CUtensorMap quants, scales, zeros;
};

// What a block takes: all of its cluster's units, and its part of k.
template <bool kIsCluster>
struct PackedShare {
  int begin, end;              // units
  int first_piece, end_piece;  // of each row

  __device__ __forceinline__ explicit PackedShare(const PackedPlan& plan) {
    if (!kIsCluster || plan.ranks == 1) {
      ring_range(plan.ring, begin, end);
      begin *= plan.together, end *= plan.together;
      first_piece = 0, end_piece = plan.pieces;
      return;
    }
    const int clusters = gridDim.x / 2, cluster = blockIdx.x / 2, half = clusters / 2;
    // This is ring_share(); of two clusters that have the same SMs the parts that are larger are not on the
    // same.
    const int at = clusters % 2 ? cluster : cluster < half ? 2 * cluster : 2 * (cluster - half) + 1;
    const bool is_second = blockIdx.x % 2 != (cluster >= half);
    begin = at * plan.ring.share + min(at, plan.ring.larger);
    end = begin + plan.ring.share + (at < plan.ring.larger);
    begin *= plan.together, end *= plan.together;
    first_piece = is_second ? plan.pieces / 2 : 0, end_piece = is_second ? plan.pieces : plan.pieces / 2;
  }
};

// Shared memory in front of the ring in which one row of 16 bits looks up the values of a table's places
// (packed_gemv_halves.cuh).
constexpr int kPairTableBytes = 256 * kWarpSize * 4;
template <class T, PackedFormat kFormat, int kColumns>
constexpr int kTableBytes =
    Traits<kFormat>::kHasTable && kColumns == 1 && sizeof(T) == 2 ? kPairTableBytes : 0;

// Columns of B that a row of x takes: a float32 x is the sum of three float16 terms, the fourth column
// nothing.
template <class T>
constexpr int kXColumns = sizeof(T) == 4 ? 4 : 1;
template <class T>
constexpr int kXTerms = sizeof(T) == 4 ? 3 : 1;
constexpr float kNextTerm = 0x1p11f;  // a term's factor beside the one before

// The weight row of one half of a unit.
__device__ __forceinline__ int packed_row(const GemvParams& p, const RopeAppendParams& rope,
                                          const RingPlan& plan, int unit, int half) {
  if (plan.append) return pair_feature<false>(rope, unit, half);
  return p.gated ? half * p.n + unit : unit;
}

// Where each sub-block has a zero, or bytes have a scale for each sub-block, quants are always taken less
// their zero: sums of x times zeros would be products of their own.
template <PackedFormat kFormat>
constexpr bool kCentersAll =
    Traits<kFormat>::kEachSubBlock && (Traits<kFormat>::kHasZeros || Traits<kFormat>::kBits == 8);
// Whether sums of x take off what quants have in excess, of an x in 16 bits.
template <PackedFormat kFormat>
constexpr bool kTakesOff = Traits<kFormat>::kIsInteger && !kCentersAll<kFormat>;
// A float32 x keeps all bits only beside quants less their zero, which takes another instruction for two of
// them.
template <class T, PackedFormat kFormat>
constexpr bool kCenters = sizeof(T) == 4 || kCentersAll<kFormat>;
// And beside values of a table that are two float16.
template <class T, PackedFormat kFormat>
constexpr int kTermsOf = sizeof(T) == 4 ? kTableTerms<kFormat> : 1;

// Pairs of A out of 32 bits of a row: kProducts products' two, low and high k. Centered they are quants less
// their zero, else in units of kQuantUnit and with what they have in excess; of fp8 in units of kFloat8Unit,
// of a table of its steps: their term kTerm.
template <PackedFormat kFormat, bool kCentered, int kTerm = 0>
struct Quants {
  static constexpr int kProducts = kBits<kFormat> == 4 ? 2 : 1;
  uint32_t pair[kProducts][2];

  __device__ __forceinline__ Quants(uint32_t word, int zero) {
    constexpr uint32_t kMagic = 0x64006400u;  // two times 1024, whose last bits are units
    if constexpr (Traits<kFormat>::kHasTable) {
      uint32_t pairs[4];
      if constexpr (kIsMinifloat<kFormat>) {
        minifloat_pairs(word, pairs);
      } else {
        table_pairs<kFormat, kTerm>(word, pairs);
      }
#pragma unroll
      for (int product = 0; product < 2; ++product)
        pair[product][0] = pairs[2 * product], pair[product][1] = pairs[2 * product + 1];
    } else if constexpr (kBits<kFormat> == 4) {
#pragma unroll
      for (int product = 0; product < 2; ++product) {
        pair[product][0] = word & 0x000f000fu;
        pair[product][1] = word & 0x00f000f0u;  // 16 times as much: x is 16 times less
        if constexpr (kCentered) {
          pair[product][0] =
              bits_of_half2(__hsub2(half2_of(pair[product][0] | kMagic), all_half2(1024.f + zero)));
          pair[product][1] = bits_of_half2(
              __hfma2(half2_of(pair[product][1] | kMagic), all_half2(0.0625f), all_half2(-64.f - zero)));
        }
        word >>= 8;
      }
    } else if constexpr (!Traits<kFormat>::kIsFloat) {
      constexpr bool kSigned = Traits<kFormat>::kIsSigned;
      const uint32_t unsigned_bytes = kSigned ? word ^ 0x80808080u : word;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        pair[0][i] = __byte_perm(unsigned_bytes, 0, i == 0 ? 0x4140 : 0x4342);
        if constexpr (kCentered)
          pair[0][i] = bits_of_half2(
              __hsub2(half2_of(pair[0][i] | kMagic), all_half2(1024.f + (kSigned ? 128 : zero))));
      }
    } else {
      pair[0][0] = float8_pair<false>(word);
      pair[0][1] = float8_pair<true>(word);
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

// What quants have in excess of the weight in units of its scale, or what each of the zero is worth.
template <PackedFormat kFormat>
constexpr int kExcess = kBits<kFormat> == 8          ? 128
                        : Traits<kFormat>::kHasZeros ? 1
                                                     : Traits<kFormat>::kZero;

// What a product is in units of.
template <PackedFormat kFormat, bool kCentered>
constexpr float kUndoQuants = Traits<kFormat>::kIsFloat    ? 1.f / kFloat8Unit
                              : kIsMinifloat<kFormat>      ? 1.f / kMinifloatUnit
                              : Traits<kFormat>::kHasTable ? 1.f / Traits<kFormat>::kSteps
                              : kCentered                  ? 1.f
                                                           : 1.f / kQuantUnit;

}  // namespace hf_fastpath
