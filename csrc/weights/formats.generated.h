// Written by the build (hf_fastpath/native/generated.py) from hf_fastpath/packed_formats.py.
#pragma once

#include <cstdint>
#include <type_traits>

namespace hf_fastpath {

// What quants are, which quant is the weight 0, and the type of scales: QuantValues, ZeroPoints, SCALE_BYTES
// and RECORDS have them in Python. weights/packed_values.h says what values these stand for.
enum class PackedValues : int { kIntegers, kFloats, kTable };
enum class PackedZeros : int { kNone, kFixed, kOfGroup };
enum class PackedScales : int {
  kFloat16,
  kFloat32,
  kE8m0,
  kMinimums,
  kFloatZeros,
  kMiddles,
  kKMinimums,
  kKScales
};

struct PackedTraits {
  const char* name;
  int bits;  // of a quant
  PackedValues values;
  int64_t group;  // weights of a row that share a scale; 0: the whole row
  PackedZeros zeros;
  int zero;  // the quant of kFixed
  PackedScales scales;
  int scale_bytes;    // of an element of the tensor that holds scales
  int record_bytes;   // of what a block has instead of scales, or 0
  bool has_kernels;   // of its own, beside those that read any format
  bool gpu_products;  // kernels of products on a GPU read it
  bool gpu_experts;   // those of experts do
  int steps;          // of kTable: 1 is so many steps
  float table[16];    // of kTable: the values
};

// The numbers are those of ops' schemas: hf_fastpath/choices.py has the names.
enum class PackedFormat : int {
  kInt8 = 0,
  kFp8 = 1,
  kInt4 = 2,
  kInt4G32 = 3,
  kNf4 = 4,
  kFp4 = 5,
  kInt4G32Zeros = 6,
  kInt8G32Zeros = 7,
  kFp8G128 = 8,
  kInt8Row = 9,
  kMxfp4 = 10,
  kInt8G32 = 11,
  kInt4G32Min = 12,
  kInt4G32K = 13,
  kInt8G32K = 14,
  kInt8G16K = 15,
  kInt4G32FloatZeros = 16,
  kInt4G32Middles = 17,
};
constexpr PackedFormat kLastPackedFormat = PackedFormat::kInt4G32Middles;

// The format of number i is row i; tables have four values a line.
// clang-format off
inline constexpr PackedTraits kPackedTraits[] = {
    {"int8", 8, PackedValues::kIntegers, 128, PackedZeros::kNone, 0, PackedScales::kFloat16, 2, 0, true, true, true, 0, {}},
    {"fp8", 8, PackedValues::kFloats, 0, PackedZeros::kNone, 0, PackedScales::kFloat16, 2, 0, true, true, true, 0, {}},
    {"int4", 4, PackedValues::kIntegers, 128, PackedZeros::kOfGroup, 0, PackedScales::kFloat16, 2, 0, true, true, true, 0, {}},
    {"int4_g32", 4, PackedValues::kIntegers, 32, PackedZeros::kFixed, 8, PackedScales::kFloat16, 2, 0, true, true, true, 0, {}},
    {"nf4", 4, PackedValues::kTable, 64, PackedZeros::kNone, 0, PackedScales::kFloat32, 4, 0, true, true, true, 6872, {
         -0x1p+0f, -0x1.647362p-1f, -0x1.0cd66p-1f, -0x1.94654p-2f,
         -0x1.23449ap-2f, -0x1.7a6a7ep-3f, -0x1.74f0e2p-4f, 0x0p+0f,
         0x1.45f5fep-4f, 0x1.4995c6p-3f, 0x1.f809bap-3f, 0x1.5a0674p-2f,
         0x1.c3497p-2f, 0x1.200f56p-1f, 0x1.722766p-1f, 0x1p+0f}},
    {"fp4", 4, PackedValues::kTable, 64, PackedZeros::kNone, 0, PackedScales::kFloat32, 4, 0, true, true, true, 6144, {
         0x0p+0f, 0x1.555556p-8f, 0x1.555556p-1f, 0x1p+0f,
         0x1.555556p-2f, 0x1p-1f, 0x1.555556p-3f, 0x1p-2f,
         0x0p+0f, -0x1.555556p-8f, -0x1.555556p-1f, -0x1p+0f,
         -0x1.555556p-2f, -0x1p-1f, -0x1.555556p-3f, -0x1p-2f}},
    {"int4_g32_zeros", 4, PackedValues::kIntegers, 32, PackedZeros::kOfGroup, 0, PackedScales::kFloat16, 2, 0, true, true, true, 0, {}},
    {"int8_g32_zeros", 8, PackedValues::kIntegers, 32, PackedZeros::kOfGroup, 0, PackedScales::kFloat16, 2, 0, true, true, true, 0, {}},
    {"fp8_g128", 8, PackedValues::kFloats, 128, PackedZeros::kNone, 0, PackedScales::kFloat32, 4, 0, true, true, true, 0, {}},
    {"int8_row", 8, PackedValues::kIntegers, 0, PackedZeros::kNone, 0, PackedScales::kFloat32, 4, 0, true, true, true, 0, {}},
    {"mxfp4", 4, PackedValues::kTable, 32, PackedZeros::kNone, 0, PackedScales::kE8m0, 1, 0, true, false, true, 2, {
         0x0p+0f, 0x1p-1f, 0x1p+0f, 0x1.8p+0f,
         0x1p+1f, 0x1.8p+1f, 0x1p+2f, 0x1.8p+2f,
         -0x0p+0f, -0x1p-1f, -0x1p+0f, -0x1.8p+0f,
         -0x1p+1f, -0x1.8p+1f, -0x1p+2f, -0x1.8p+2f}},
    {"int8_g32", 8, PackedValues::kIntegers, 32, PackedZeros::kNone, 0, PackedScales::kFloat16, 2, 0, true, true, true, 0, {}},
    {"int4_g32_min", 4, PackedValues::kIntegers, 32, PackedZeros::kNone, 0, PackedScales::kMinimums, 1, 16, true, false, false, 0, {}},
    {"int4_g32_k", 4, PackedValues::kIntegers, 32, PackedZeros::kNone, 0, PackedScales::kKMinimums, 1, 12, true, false, false, 0, {}},
    {"int8_g32_k", 8, PackedValues::kIntegers, 32, PackedZeros::kNone, 0, PackedScales::kKMinimums, 1, 12, true, false, false, 0, {}},
    {"int8_g16_k", 8, PackedValues::kIntegers, 16, PackedZeros::kNone, 0, PackedScales::kKScales, 1, 12, true, false, false, 0, {}},
    {"int4_g32_float_zeros", 4, PackedValues::kIntegers, 32, PackedZeros::kNone, 0, PackedScales::kFloatZeros, 1, 16, true, false, false, 0, {}},
    {"int4_g32_middles", 4, PackedValues::kIntegers, 32, PackedZeros::kNone, 0, PackedScales::kMiddles, 1, 16, true, false, false, 0, {}},
};
// clang-format on

// Calls f(the format as a constant), of a format that has kernels.
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
    case PackedFormat::kInt4G32Zeros:
      return f(std::integral_constant<PackedFormat, PackedFormat::kInt4G32Zeros>{});
    case PackedFormat::kInt8G32Zeros:
      return f(std::integral_constant<PackedFormat, PackedFormat::kInt8G32Zeros>{});
    case PackedFormat::kFp8G128:
      return f(std::integral_constant<PackedFormat, PackedFormat::kFp8G128>{});
    case PackedFormat::kInt8Row:
      return f(std::integral_constant<PackedFormat, PackedFormat::kInt8Row>{});
    case PackedFormat::kMxfp4:
      return f(std::integral_constant<PackedFormat, PackedFormat::kMxfp4>{});
    case PackedFormat::kInt8G32:
      return f(std::integral_constant<PackedFormat, PackedFormat::kInt8G32>{});
    case PackedFormat::kInt4G32Min:
      return f(std::integral_constant<PackedFormat, PackedFormat::kInt4G32Min>{});
    case PackedFormat::kInt4G32K:
      return f(std::integral_constant<PackedFormat, PackedFormat::kInt4G32K>{});
    case PackedFormat::kInt8G32K:
      return f(std::integral_constant<PackedFormat, PackedFormat::kInt8G32K>{});
    case PackedFormat::kInt8G16K:
      return f(std::integral_constant<PackedFormat, PackedFormat::kInt8G16K>{});
    case PackedFormat::kInt4G32FloatZeros:
      return f(std::integral_constant<PackedFormat, PackedFormat::kInt4G32FloatZeros>{});
    case PackedFormat::kInt4G32Middles:
      return f(std::integral_constant<PackedFormat, PackedFormat::kInt4G32Middles>{});
    default:
      break;
  }
  __builtin_unreachable();
}

// The same of a format that kernels of experts on a GPU read.
template <class F>
static inline auto with_gpu_experts_format(PackedFormat format, F&& f) {
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
    case PackedFormat::kInt4G32Zeros:
      return f(std::integral_constant<PackedFormat, PackedFormat::kInt4G32Zeros>{});
    case PackedFormat::kInt8G32Zeros:
      return f(std::integral_constant<PackedFormat, PackedFormat::kInt8G32Zeros>{});
    case PackedFormat::kFp8G128:
      return f(std::integral_constant<PackedFormat, PackedFormat::kFp8G128>{});
    case PackedFormat::kInt8Row:
      return f(std::integral_constant<PackedFormat, PackedFormat::kInt8Row>{});
    case PackedFormat::kMxfp4:
      return f(std::integral_constant<PackedFormat, PackedFormat::kMxfp4>{});
    case PackedFormat::kInt8G32:
      return f(std::integral_constant<PackedFormat, PackedFormat::kInt8G32>{});
    default:
      break;
  }
  __builtin_unreachable();
}

// The same of a format that kernels of products on a GPU read.
template <class F>
static inline auto with_gpu_format(PackedFormat format, F&& f) {
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
    case PackedFormat::kInt4G32Zeros:
      return f(std::integral_constant<PackedFormat, PackedFormat::kInt4G32Zeros>{});
    case PackedFormat::kInt8G32Zeros:
      return f(std::integral_constant<PackedFormat, PackedFormat::kInt8G32Zeros>{});
    case PackedFormat::kFp8G128:
      return f(std::integral_constant<PackedFormat, PackedFormat::kFp8G128>{});
    case PackedFormat::kInt8Row:
      return f(std::integral_constant<PackedFormat, PackedFormat::kInt8Row>{});
    case PackedFormat::kInt8G32:
      return f(std::integral_constant<PackedFormat, PackedFormat::kInt8G32>{});
    default:
      break;
  }
  __builtin_unreachable();
}

}  // namespace hf_fastpath
