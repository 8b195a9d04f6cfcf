// The loops of fake_quantize on the CPU, which a compiler makes vectors of: fake_quantize_cpu.cpp and
// fake_quantize_avx2.cpp include them, each with the instructions it may use. Linkage is internal for that
// reason.
#pragma once

#include <cmath>
#include <type_traits>

#ifdef __F16C__
#include <immintrin.h>
#endif

#include "common/cpu_math.h"
#include "fake_quantize/fake_quantize_cpu.h"

namespace hf_fastpath {
namespace {

// A magnitude with the sign of `value`: zeros keep theirs.
inline float with_sign(float magnitude, float value) {
  return bits_to_float((float_to_bits(magnitude) & 0x7fffffffu) | (float_to_bits(value) & 0x80000000u));
}

// The nearest float8_e4m3fn, ties to even, of magnitudes up to 448.
inline float nearest_float8(float value) {
  constexpr float kLeastNormal = 0x1p-6f, kSubnormals = 0x1.8p14f;  // floats near the latter are 2^-9 apart
  const uint32_t bits = float_to_bits(value);
  const float normal = bits_to_float((bits + 0x7ffffu + (bits >> 20 & 1u)) & 0xfff00000u);
  const float subnormal = (value + kSubnormals) - kSubnormals;
  return with_sign(std::fabs(value) < kLeastNormal ? subnormal : normal, value);
}

// The nearest whole number, ties to even, of magnitudes below 2^22.
inline float nearest_whole(float value) {
  constexpr float kWhole = 0x1.8p23f;
  return with_sign((value + kWhole) - kWhole, value);
}

// The largest magnitude, or NaN if there is one: its bits are the largest of all.
inline float largest(const float* row, int64_t count) {
  uint32_t most = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = float_to_bits(row[i]) & 0x7fffffffu;
    most = bits > most ? bits : most;
  }
  return bits_to_float(most);
}

inline float cut(float value, float most) { return value > most ? most : value < -most ? -most : value; }

template <class T>
float narrow(float value) {
#ifdef __F16C__
  if constexpr (std::is_same_v<T, Half>) return _cvtsh_ss(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT));
#endif
  T stored;
  from_float(value, &stored);
  return to_float(stored);
}

template <class T>
constexpr float kEpsilon = std::is_same_v<T, float>  ? 0x1p-23f
                           : std::is_same_v<T, Half> ? 0x1p-10f
                                                     : 0x1p-7f;

// Inputs of one float8 scale.
inline void to_float8(float* row, int64_t count, float most) {
  const float scale = most / kLargestFloat8;
  const float divisor = scale < kLeastFakeScale ? kLeastFakeScale : scale;
  for (int64_t i = 0; i < count; ++i) row[i] = nearest_float8(cut(row[i] / divisor, kLargestFloat8)) * scale;
}

// A row whose scale, quotients and results are rounded to T.
template <class T, bool kFloat8>
void to_narrow(float* row, int64_t count, float most) {
  float scale = narrow<T>(most / (kFloat8 ? kLargestFloat8 : 127.5f));
  if (scale == 0.0f) scale = kEpsilon<T>;
  for (int64_t i = 0; i < count; ++i) {
    const float steps = narrow<T>(row[i] / scale);
    if constexpr (kFloat8) {
      row[i] = nearest_float8(cut(steps, kLargestFloat8)) * scale;
    } else {
      row[i] = nearest_whole(steps > 127.0f ? 127.0f : steps < -128.0f ? -128.0f : steps) * scale;
    }
  }
}

// A row whose scale is rounded to T, and its quotients are not.
template <class T>
void to_int8_row(float* row, int64_t count, float most) {
  float scale = narrow<T>(most / 127.5f);
  if (scale < kLeastInt8Scale) scale = kLeastInt8Scale;
  const float factor = 1.0f / scale;
  for (int64_t i = 0; i < count; ++i) {
    const float steps = row[i] * factor;
    row[i] = nearest_whole(steps > 127.0f ? 127.0f : steps < -128.0f ? -128.0f : steps) * scale;
  }
}

// A row beside columns that stay, which are marked, or of one row are those of its outliers.
template <class T>
void to_int8(const FakeQuantizeParams& p, const T* x, float* row) {
  const float limit = p.limit;
  const bool may_stay = limit > 0;
  uint32_t bits = 0;
  for (int64_t i = 0; i < p.columns; ++i) {
    const float value = narrow<Half>(row[i]), magnitude = std::fabs(value);
    row[i] = may_stay && magnitude >= limit ? 0.0f : value;
    const uint32_t of_value = float_to_bits(row[i]) & 0x7fffffffu;
    bits = of_value > bits ? of_value : bits;
  }
  const float most = bits_to_float(bits), scale = most / kLargestInt8,
              factor = most == 0.0f ? 0.0f : 1.0f / most * kLargestInt8;
  for (int64_t i = 0; i < p.columns; ++i) row[i] = nearest_whole(row[i] * factor) * scale;
  if (!may_stay) return;
  for (int64_t i = 0; i < p.columns; ++i) {
    const bool stays =
        p.marks != nullptr ? p.marks[i] != 0 : std::fabs(narrow<Half>(to_float(x[i]))) >= limit;
    if (stays) row[i] = to_float(x[i]);
  }
}

template <class T>
void fake_quantize_row(const FakeQuantizeParams& p, const T* x, T* out, float* row) {
  const int64_t count = p.columns;
  for (int64_t i = 0; i < count; ++i) row[i] = to_float(x[i]);
  switch (p.quants) {
    case InputQuants::kFp8Block:
    case InputQuants::kFp8BlockNarrow:
      for (int64_t i = 0; i < count; i += kFakeBlock) {
        const int64_t some = count - i < kFakeBlock ? count - i : kFakeBlock;
        const auto round = p.quants == InputQuants::kFp8Block ? to_float8 : to_narrow<T, true>;
        round(row + i, some, largest(row + i, some));
      }
      break;
    case InputQuants::kFp8Row: {
      const float most = largest(row, count);
      to_float8(row, count, p.limit > 0 && most > p.limit ? p.limit : most);
      break;
    }
    case InputQuants::kFp8RowNarrow:
      to_narrow<T, true>(row, count, largest(row, count));
      break;
    case InputQuants::kInt8RowNarrow:
      to_narrow<T, false>(row, count, largest(row, count));
      break;
    case InputQuants::kInt8Row:
      to_int8_row<T>(row, count, largest(row, count));
      break;
    case InputQuants::kInt8Outliers:
      to_int8(p, x, row);
      break;
  }
  for (int64_t i = 0; i < count; ++i) from_float(row[i], out + i);
}

inline void fake_quantize_rows(const FakeQuantizeParams& p, int64_t begin, int64_t end, float* row) {
  with_storage(p.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    for (int64_t r = begin; r < end; ++r) {
      fake_quantize_row(p, static_cast<const T*>(p.x) + r * p.stride, static_cast<T*>(p.out) + r * p.columns,
                        row);
    }
  });
}

inline void mark_columns(const FakeQuantizeParams& p, int64_t begin, int64_t end) {
  with_storage(p.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    for (int64_t i = begin; i < end; ++i) p.marks[i] = 0;
    for (int64_t r = 0; r < p.rows; ++r) {
      const T* x = static_cast<const T*>(p.x) + r * p.stride;
      for (int64_t i = begin; i < end; ++i) {
        p.marks[i] = p.marks[i] | static_cast<uint8_t>(std::fabs(narrow<Half>(to_float(x[i]))) >= p.limit);
      }
    }
  });
}

}  // namespace
}  // namespace hf_fastpath
