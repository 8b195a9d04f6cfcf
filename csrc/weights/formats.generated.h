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
};
constexpr PackedFormat kLastPackedFormat = PackedFormat::kInt4G32;

// The format of number i is row i.
inline constexpr PackedTraits kPackedTraits[] = {
    {"int8", 8, PackedValues::kIntegers, 128, PackedZeros::kNone, 0},
    {"fp8", 8, PackedValues::kFloats, 0, PackedZeros::kNone, 0},
    {"int4", 4, PackedValues::kIntegers, 128, PackedZeros::kOfGroup, 0},
    {"int4_g32", 4, PackedValues::kIntegers, 32, PackedZeros::kFixed, 8},
};

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
  }
  __builtin_unreachable();
}

}  // namespace hf_fastpath
