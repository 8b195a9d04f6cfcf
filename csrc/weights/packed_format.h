// How weights of few bits lie in memory, for every kernel. hf_fastpath/packed_formats.py describes the
// formats, and formats.generated.h has what it says of them.
#pragma once

#include <cstdint>

namespace hf_fastpath {

constexpr int64_t kPackedBlock = 128;  // weights that are ordered together
constexpr int64_t kStretches = 4;      // of a block, whose 32-bit words take turns
constexpr int64_t kStretch = kPackedBlock / kStretches;

// What quants are: integers, of 8 bits signed and of 4 bits from 0 to 15; floats in e4m3; places in a table.
enum class PackedValues : int { kIntegers, kFloats, kTable };

// Which quant is the weight 0: the quant 0; one for all groups; one that each group has.
enum class PackedZeros : int { kNone, kFixed, kOfGroup };

struct PackedTraits {
  const char* name;
  int bits;  // of a quant
  PackedValues values;
  int64_t group;  // weights of a row that share a scale in float16; 0: the whole row
  PackedZeros zeros;
  int zero;  // the quant of kFixed
};

}  // namespace hf_fastpath

#include "weights/formats.generated.h"

namespace hf_fastpath {

constexpr const PackedTraits& traits_of(PackedFormat format) {
  return kPackedTraits[static_cast<int>(format)];
}

constexpr int bits_of(PackedFormat format) { return traits_of(format).bits; }
constexpr bool is_float(PackedFormat format) { return traits_of(format).values == PackedValues::kFloats; }
constexpr bool has_zeros(PackedFormat format) { return traits_of(format).zeros == PackedZeros::kOfGroup; }
constexpr bool has_scale_of_row(PackedFormat format) { return traits_of(format).group == 0; }
constexpr bool has_stretch_scales(PackedFormat format) { return traits_of(format).group == kStretch; }

// Scales of a row.
constexpr int64_t groups_of(PackedFormat format, int64_t blocks) {
  return has_scale_of_row(format) ? 1 : blocks * (kPackedBlock / traits_of(format).group);
}

// Which of a row's scales is that of a block's stretch.
constexpr int64_t group_of(PackedFormat format, int64_t block, int64_t stretch) {
  return has_scale_of_row(format) ? 0 : has_stretch_scales(format) ? block * kStretches + stretch : block;
}

// What kernels ask of a format, as constants.
template <PackedFormat kFormat>
struct Traits {
  static constexpr int kBits = bits_of(kFormat);
  static constexpr bool kIsFloat = is_float(kFormat);
  static constexpr bool kHasZeros = has_zeros(kFormat);  // of groups
  static constexpr int kZero = traits_of(kFormat).zero;  // else this quant is the weight 0
  // A scale is a row's: sums are multiplied by it, and not weights.
  static constexpr bool kScalesSums = has_scale_of_row(kFormat);
  static constexpr bool kEachStretch = has_stretch_scales(kFormat);  // a scale for each
  static constexpr int kScalesPerBlock =
      kScalesSums ? 0 : static_cast<int>(kPackedBlock / (kScalesSums ? 1 : traits_of(kFormat).group));

  // Kernels know no other formats: what they take for granted of a branch is said here.
  static_assert(traits_of(kFormat).values != PackedValues::kTable, "no kernel looks quants up in a table");
  static_assert(kBits == 8 || kBits == 4, "kernels unpack quants of 8 and of 4 bits");
  static_assert(kIsFloat == kScalesSums && (kBits == 8 || !kIsFloat), "floats are e4m3, with a scale a row");
  static_assert(kBits == 4 || traits_of(kFormat).zeros == PackedZeros::kNone, "bytes are signed");
  static_assert(kBits == 8 || kEachStretch == !kHasZeros, "groups of 128 have zeros, those of 32 have none");
  static_assert(!kEachStretch || (kBits == 4 && kZero == 8), "groups of 32 are of 4 bits, with a zero of 8");
  static_assert(kScalesSums || kEachStretch || kScalesPerBlock == 1, "else a block has one scale");
};

}  // namespace hf_fastpath
