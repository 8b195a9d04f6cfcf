// Written by the build (hf_fastpath/native/generated.py) from hf_fastpath/packed_formats.py.
#pragma once

#include <type_traits>

namespace hf_fastpath {

// By number in ops' schemas: hf_fastpath/choices.py has the names.
enum class PackedFormat : int {
  kInt8 = 0,
  kFp8 = 1,
  kInt4 = 2,
  kInt4G32 = 3,
  kNf4 = 4,
  kFp4 = 5,
};
constexpr PackedFormat kLastPackedFormat = PackedFormat::kFp4;

// The format of number i is row i; tables have four values a line.
// clang-format off
inline constexpr PackedTraits kPackedTraits[] = {
    {"int8", 8, PackedValues::kIntegers, 128, PackedZeros::kNone, 0, PackedScales::kFloat16, 0, {}},
    {"fp8", 8, PackedValues::kFloats, 0, PackedZeros::kNone, 0, PackedScales::kFloat16, 0, {}},
    {"int4", 4, PackedValues::kIntegers, 128, PackedZeros::kOfGroup, 0, PackedScales::kFloat16, 0, {}},
    {"int4_g32", 4, PackedValues::kIntegers, 32, PackedZeros::kFixed, 8, PackedScales::kFloat16, 0, {}},
    {"nf4", 4, PackedValues::kTable, 64, PackedZeros::kNone, 0, PackedScales::kFloat32, 6872, {
         -0x1p+0f, -0x1.647362p-1f, -0x1.0cd66p-1f, -0x1.94654p-2f,
         -0x1.23449ap-2f, -0x1.7a6a7ep-3f, -0x1.74f0e2p-4f, 0x0p+0f,
         0x1.45f5fep-4f, 0x1.4995c6p-3f, 0x1.f809bap-3f, 0x1.5a0674p-2f,
         0x1.c3497p-2f, 0x1.200f56p-1f, 0x1.722766p-1f, 0x1p+0f}},
    {"fp4", 4, PackedValues::kTable, 64, PackedZeros::kNone, 0, PackedScales::kFloat32, 6144, {
         0x0p+0f, 0x1.555556p-8f, 0x1.555556p-1f, 0x1p+0f,
         0x1.555556p-2f, 0x1p-1f, 0x1.555556p-3f, 0x1p-2f,
         0x0p+0f, -0x1.555556p-8f, -0x1.555556p-1f, -0x1p+0f,
         -0x1.555556p-2f, -0x1p-1f, -0x1.555556p-3f, -0x1p-2f}},
};
// clang-format on

// Calls f(the format as a constant). Ops have checked that `format` is one.
template <class F>
static inline auto with_format(PackedFormat format, F&& f) {
  switch (format) {
    case PackedFormat::kInt8:
      return f(std::integral_constant<PackedFormat, PackedFormat::kInt8>{});
    case PackedFormat::kFp8:
      return f(std::integral_constant<PackedFormat, PackedFormat::kFp8>{});
    case PackedFormat::kInt4:
      return f(std::integral_constant<PackedFormat, PackedFormat::kInt4>{});
    case PackedFormat::kInt4G32:
      return f(std::integral_constant<PackedFormat, PackedFormat::kInt4G32>{});
    case PackedFormat::kNf4:
      return f(std::integral_constant<PackedFormat, PackedFormat::kNf4>{});
    case PackedFormat::kFp4:
      return f(std::integral_constant<PackedFormat, PackedFormat::kFp4>{});
  }
  __builtin_unreachable();
}

}  // namespace hf_fastpath
