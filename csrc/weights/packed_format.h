// How weights of few bits lie in memory, for every kernel. hf_fastpath/packed_formats.py describes the
// formats, and formats.generated.h has what it says of them.
#pragma once

#include <cstdint>
#include <type_traits>

namespace hf_fastpath {

constexpr int64_t kPackedBlock = 128;  // weights that are ordered together
constexpr int64_t kSubBlocks = 4;      // of a block, whose 32-bit words take turns
constexpr int64_t kSubBlock = kPackedBlock / kSubBlocks;

}  // namespace hf_fastpath

#include "weights/formats.generated.h"

namespace hf_fastpath {

constexpr const PackedTraits& traits_of(PackedFormat format) {
  return kPackedTraits[static_cast<int>(format)];
}

constexpr bool has_kernels(PackedFormat format) { return traits_of(format).has_kernels; }
constexpr bool has_gpu_products(PackedFormat format) { return traits_of(format).gpu_products; }
constexpr bool has_gpu_experts(PackedFormat format) { return traits_of(format).gpu_experts; }
constexpr int bits_of(PackedFormat format) { return traits_of(format).bits; }
constexpr bool is_float(PackedFormat format) { return traits_of(format).values == PackedValues::kFloats; }
constexpr bool has_table(PackedFormat format) { return traits_of(format).values == PackedValues::kTable; }
constexpr bool has_zeros(PackedFormat format) { return traits_of(format).zeros == PackedZeros::kOfGroup; }
constexpr bool has_scale_of_row(PackedFormat format) { return traits_of(format).group == 0; }
constexpr int scale_bytes(PackedFormat format) { return traits_of(format).scale_bytes; }
constexpr bool has_records(PackedFormat format) { return traits_of(format).record_bytes > 0; }
// Whether records are pairs of float16: a scale, and what its minimum follows from.
constexpr bool are_pairs(PackedScales scales) {
  return scales == PackedScales::kMinimums || scales == PackedScales::kFloatZeros ||
         scales == PackedScales::kMiddles;
}
constexpr bool pairs_hold_zeros(PackedScales scales) { return scales == PackedScales::kFloatZeros; }
constexpr bool pairs_hold_middles(PackedScales scales) { return scales == PackedScales::kMiddles; }
constexpr bool has_minimums(PackedFormat format) {
  return are_pairs(traits_of(format).scales) || traits_of(format).scales == PackedScales::kKMinimums;
}

// Sub-blocks of a block that share a scale; 1 where each has two.
constexpr int64_t sub_blocks_of_scale(PackedFormat format) {
  if (has_scale_of_row(format)) return kSubBlocks;
  return traits_of(format).group < kSubBlock ? 1 : traits_of(format).group / kSubBlock;
}

// Elements that the tensor of scales has for a row: scales, or bytes of records.
constexpr int64_t groups_of(PackedFormat format, int64_t blocks) {
  if (has_records(format)) return blocks * traits_of(format).record_bytes;
  return has_scale_of_row(format) ? 1 : blocks * (kPackedBlock / traits_of(format).group);
}

// Which of a row's scales is that of a block's sub-block.
constexpr int64_t group_of(PackedFormat format, int64_t block, int64_t sub_block) {
  const int64_t together = sub_blocks_of_scale(format);
  return has_scale_of_row(format) ? 0 : block * (kSubBlocks / together) + sub_block / together;
}

// What kernels ask of a format that has kernels, as constants.
template <PackedFormat kFormat>
struct Traits {
  static constexpr int kBits = bits_of(kFormat);
  static constexpr bool kIsFloat = is_float(kFormat);
  static constexpr bool kHasTable = has_table(kFormat);
  static constexpr bool kIsInteger = !kIsFloat && !kHasTable;
  static constexpr int kSteps = kHasTable ? traits_of(kFormat).steps : 1;  // that 1 is in a table
  static constexpr bool kHasZeros = has_zeros(kFormat);                    // of groups
  static constexpr int kZero = traits_of(kFormat).zero;                    // else this quant is the weight 0
  // A scale is a row's: sums are multiplied by it, and not weights.
  static constexpr bool kScalesSums = has_scale_of_row(kFormat);
  static constexpr int kTogether = static_cast<int>(sub_blocks_of_scale(kFormat));  // sub-blocks of a scale
  static constexpr bool kEachSubBlock = kTogether == 1;                             // a scale for each
  static constexpr int kScalesPerBlock = kScalesSums ? 0 : static_cast<int>(kSubBlocks) / kTogether;
  static constexpr bool kHasRecords = has_records(kFormat), kHasMinimums = has_minimums(kFormat);
  static constexpr bool kScalesHalves =
      !kScalesSums && traits_of(kFormat).group < kSubBlock;  // of sub-blocks
  // Quants of 8 bits that are signed.
  static constexpr bool kIsSigned = kBits == 8 && kIsInteger && !kHasZeros;
  static constexpr int kZerosPerBlock = kHasZeros ? kScalesPerBlock : 0;
  static constexpr int kScaleBytes = scale_bytes(kFormat);  // of a scale, and what holds its bits
  using Scale =
      std::conditional_t<kScaleBytes == 4, float, std::conditional_t<kScaleBytes == 1, uint8_t, uint16_t>>;
  static constexpr int kScaleHalves = kScalesPerBlock * kScaleBytes / 2;  // of a block, in 16 bits
  static constexpr int kRecordBytes = traits_of(kFormat).record_bytes;
  static constexpr int kBlockScaleBytes = kHasRecords ? kRecordBytes : kScalesPerBlock * kScaleBytes;

  // Kernels know no other formats: what they take for granted of a branch is said here.
  static_assert(!kHasTable || (kBits == 4 && !kHasZeros && kZero == 0),
                "tables are of 4 bits, without zeros");
  static_assert(kHasTable ? (kTogether == 2 && kScaleBytes == 4) || (kEachSubBlock && kScaleBytes == 1)
                          : kTogether != 2,
                "values of a table, and no others, have scales in float32, of 64 weights, or bytes, of 32");
  static_assert(kHasTable || kHasRecords || kScaleBytes == 2 || kScalesSums || kIsFloat,
                "other scales in float32 are a row's, or those of floats");
  static_assert(!has_gpu_products(kFormat) || kScaleBytes != 1,
                "on a GPU experts alone have scales in bytes");
  static_assert(!kHasRecords || (!has_gpu_products(kFormat) && !has_gpu_experts(kFormat)),
                "kernels of a CPU alone read records");
  static_assert(!kHasRecords || (kIsInteger && !kHasZeros && kEachSubBlock),
                "records are of whole numbers, without zeros");
  static_assert(!kScalesHalves || (kIsSigned && kHasRecords && !kHasMinimums),
                "halves of sub-blocks have scales in records, without minimums");
  static_assert(kBits == 8 || kBits == 4, "kernels unpack quants of 8 and of 4 bits");
  static_assert(kBits == 8 || !kIsFloat, "floats are e4m3");
  static_assert(!kIsFloat || kScalesSums || (kTogether == 4 && kScaleBytes == 4),
                "floats have a scale a row, or one in float32 a block");
  static_assert(!kScalesSums || kIsFloat || kIsSigned, "a scale a row is that of floats or of signed bytes");
  static_assert(kBits == 4 || traits_of(kFormat).zeros != PackedZeros::kFixed,
                "bytes are signed, or have zeros of groups");
  static_assert(kBits == 4 || kEachSubBlock || !kHasZeros, "bytes with zeros have groups of 32");
  static_assert(kBits == 8 || kHasTable || kEachSubBlock || kHasZeros,
                "groups of 128 of 4 bits have zeros of their own");
  static_assert(kBits == 8 || !kEachSubBlock || kHasZeros || kHasTable || kZero == 8 || kHasMinimums,
                "groups of 32 of 4 bits have zeros of their own, or a zero of 8, or minimums");
  static_assert(kScalesSums || kHasTable || kEachSubBlock || kScalesPerBlock == 1,
                "else a block has one scale");
};

}  // namespace hf_fastpath
