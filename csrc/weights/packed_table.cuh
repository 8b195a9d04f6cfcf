// Values of formats whose quants are places in a table, as float16 in units of 1 / PackedTraits::steps. A
// permutation of bytes chooses from eight, so that a table of 16 values of two bytes is eight registers (or
// constants), and four lookups are six permutations and two that bring the bytes together: eleven
// instructions for four values, none of which waits for memory. A lookup in shared memory would be one for
// each value, of which an SM does half as many a cycle, and what it finds is to be converted and paired.
#pragma once

#include <cstdint>

#include "weights/packed_format.h"

namespace hf_fastpath {

// Bits of a float16, rounded to nearest.
constexpr uint16_t half_bits_of(double value) {
  const double magnitude = value < 0 ? -value : value;
  const uint16_t sign = value < 0 ? 0x8000 : 0;
  if (magnitude == 0) return 0;
  int exponent = 0;
  double power = 1;
  while (exponent < 15 && magnitude >= 2 * power) ++exponent, power *= 2;
  while (exponent > -14 && magnitude < power) --exponent, power /= 2;
  const auto places = static_cast<int>(magnitude / power * 1024 + 0.5);  // 1024 and more, or a subnormal's
  return static_cast<uint16_t>(sign | ((exponent + 14) * 1024 + places));
}

constexpr double value_of_half(uint16_t bits) {
  const int exponent = bits >> 10 & 31;
  double value = (bits & 1023) + (exponent > 0 ? 1024 : 0);
  for (int i = exponent > 0 ? exponent : 1; i < 25; ++i) value /= 2;
  for (int i = 25; i < exponent; ++i) value *= 2;
  return bits & 0x8000 ? -value : value;
}

// What a float16 of a value is, and what of the value that leaves: together 22 bits of it.
template <PackedFormat kFormat>
struct TableHalves {
  static constexpr uint16_t bits(int term, int place) {
    const double whole = double(traits_of(kFormat).table[place]) * traits_of(kFormat).steps;
    const uint16_t first = half_bits_of(whole);
    const double rest = whole - value_of_half(first), limit = (whole < 0 ? -whole : whole) * 0x1p-24;
    if (term == 0) return first;
    return rest > limit || rest < -limit ? half_bits_of(rest) : 0;  // less than a float32's last bit
  }
  // One byte of four values each.
  static constexpr uint32_t word(int term, int byte, int four) {
    uint32_t all = 0;
    for (int i = 0; i < 4; ++i) all |= uint32_t(bits(term, four * 4 + i) >> byte * 8 & 255) << i * 8;
    return all;
  }
  // Bits of a value that is a float of 4 bits (e2m1) where a float16 has the same, whose bias is 14 more.
  static constexpr uint16_t moved(int place) {
    return static_cast<uint16_t>((place & 7) << 9 | (place & 8) << 12);
  }
  static constexpr bool is_minifloat() {
    for (int place = 0; place < 16; ++place)
      if (double(traits_of(kFormat).table[place]) != value_of_half(moved(place)) * 0x1p14) return false;
    return true;
  }
  static constexpr bool is_zero(int term, int byte) {
    for (int four = 0; four < 4; ++four)
      if (word(term, byte, four) != 0) return false;
    return true;
  }
};
// Bits as constants need no function of the host's in a kernel.
template <PackedFormat kFormat, int kTerm, int kByte, int kFour>
constexpr uint32_t kTableWord = TableHalves<kFormat>::word(kTerm, kByte, kFour);
template <PackedFormat kFormat, int kTerm, int kByte>
constexpr bool kIsZeroByte = TableHalves<kFormat>::is_zero(kTerm, kByte);
// Float16 that a value takes: one where nothing is left.
template <PackedFormat kFormat>
constexpr int kTableTerms = kIsZeroByte<kFormat, 1, 0> && kIsZeroByte<kFormat, 1, 1> ? 1 : 2;

// Whether places are the values' own bits, as floats of 4 bits: no table is looked up.
template <PackedFormat kFormat>
constexpr bool kIsMinifloat = has_table(kFormat) && TableHalves<kFormat>::is_minifloat();
constexpr float kMinifloatUnit = 0x1p-14f;

// The values of a word's eight such quants in units of kMinifloatUnit: pair i has those of quants i and i
// + 4.
__device__ __forceinline__ void minifloat_pairs(uint32_t word, uint32_t (&pairs)[4]) {
  constexpr uint32_t kMagnitudes = 0x0e000e00u, kSigns = 0x80008000u;
  pairs[0] = (word << 9 & kMagnitudes) | (word << 12 & kSigns);
  pairs[1] = (word << 5 & kMagnitudes) | (word << 8 & kSigns);
  pairs[2] = (word << 1 & kMagnitudes) | (word << 4 & kSigns);
  pairs[3] = (word >> 3 & kMagnitudes) | (word & kSigns);
}

template <PackedFormat kFormat, int kTerm, int kByte>
__device__ __forceinline__ uint32_t table_bytes(uint32_t places, uint32_t halves) {
  if constexpr (kIsZeroByte<kFormat, kTerm, kByte>) {
    return 0;
  } else {
    const uint32_t first =
        __byte_perm(kTableWord<kFormat, kTerm, kByte, 0>, kTableWord<kFormat, kTerm, kByte, 1>, places);
    const uint32_t second =
        __byte_perm(kTableWord<kFormat, kTerm, kByte, 2>, kTableWord<kFormat, kTerm, kByte, 3>, places);
    return __byte_perm(first, second, halves);
  }
}

// The values of a word's eight quants, neighbors in pairs.
template <PackedFormat kFormat, int kTerm = 0>
__device__ __forceinline__ void table_pairs(uint32_t word, uint32_t (&pairs)[4]) {
#pragma unroll
  for (int four = 0; four < 2; ++four) {
    const uint32_t quants = word >> 16 * four;
    const uint32_t places = quants & 0x7777u;                   // in each half of the table
    const uint32_t halves = (quants >> 1 & 0x4444u) | 0x3210u;  // of which one is chosen
    const uint32_t low = table_bytes<kFormat, kTerm, 0>(places, halves);
    const uint32_t high = table_bytes<kFormat, kTerm, 1>(places, halves);
    pairs[2 * four] = __byte_perm(low, high, 0x5140u);
    pairs[2 * four + 1] = __byte_perm(low, high, 0x7362u);
  }
}

}  // namespace hf_fastpath
