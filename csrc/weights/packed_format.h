// How weights of few bits lie in memory, for every kernel; hf_fastpath/quantization/formats.py describes it.
#pragma once

#include <cstdint>

namespace hf_fastpath {

constexpr int64_t kPackedBlock = 128;  // weights that are ordered together
constexpr int64_t kStretches = 4;      // of a block, whose 32-bit words take turns
constexpr int64_t kStretch = kPackedBlock / kStretches;

// By number in ops' schemas: hf_fastpath/choices.py has the names.
enum class PackedFormat : int { kInt8 = 0, kFp8 = 1, kInt4 = 2, kInt4G32 = 3 };

constexpr int bits_of(PackedFormat format) {
  return format == PackedFormat::kInt8 || format == PackedFormat::kFp8 ? 8 : 4;
}

// Scales of a row.
constexpr int64_t groups_of(PackedFormat format, int64_t blocks) {
  return format == PackedFormat::kFp8 ? 1 : format == PackedFormat::kInt4G32 ? blocks * kStretches : blocks;
}

// Which of a row's scales is that of a block's stretch.
constexpr int64_t group_of(PackedFormat format, int64_t block, int64_t stretch) {
  return format == PackedFormat::kFp8       ? 0
         : format == PackedFormat::kInt4G32 ? block * kStretches + stretch
                                            : block;
}

}  // namespace hf_fastpath
