// Float8 values (e4m3) as float16 pairs.
#pragma once

#include "common/async.cuh"

namespace hf_fastpath {

// Returns the lower or the upper two of four e4m3 bytes, times 2^-8: sign, exponent and mantissa stay as they
// are, and the bias of the exponent is 8 more.
template <bool kUpper>
__device__ __forceinline__ uint32_t halves_of_float8(uint32_t bytes) {
  const uint32_t raised = __byte_perm(bytes, 0, kUpper ? 0x3424 : 0x1404);  // byte, zero
  return (raised & 0x80008000u) | (raised >> 1 & 0x3f803f80u);
}

// The same times kFloat8Unit, whatever that is where the code runs: the instruction is there since Ada.
#if HF_FASTPATH_HOPPER
constexpr float kFloat8Unit = 1.f;
template <bool kUpper>
__device__ __forceinline__ uint32_t float8_pair(uint32_t bytes) {
  uint16_t low, high;  // taken apart so that the half of a register is the conversion's operand
  asm("mov.b32 {%0, %1}, %2;" : "=h"(low), "=h"(high) : "r"(bytes));
  uint32_t pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(kUpper ? high : low));
  return pair;
}
#else
constexpr float kFloat8Unit = 0x1p-8f;
template <bool kUpper>
__device__ __forceinline__ uint32_t float8_pair(uint32_t bytes) {
  return halves_of_float8<kUpper>(bytes);
}
#endif

}  // namespace hf_fastpath
