// Tensor-core products of 16-bit operands with float32 accumulators (sm_80 and up): C[16, 8] += A[16, 16] *
// B[16, 8].
//
// Lane 4 * g + q (g = 0..7, q = 0..3) holds, two neighbors in k packed in 32 bits:
//   A: a0 = A[g, 2q..], a1 = A[g + 8, 2q..], a2 = A[g, 2q + 8..], a3 = A[g + 8, 2q + 8..]
//   B: b0 = B[2q.., g], b1 = B[2q + 8.., g]
//   C: c0, c1 = C[g, 2q], C[g, 2q + 1]; c2, c3 = C[g + 8, 2q], C[g + 8, 2q + 1]
// A sum does not depend on the order of k, nor does it matter which row of A or column of B is called which:
// the kernels here choose the orders so that what a lane needs lies in 16 contiguous bytes of device memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace hf_fastpath {

template <class T>
__device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                    uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

// The same with operands of a byte and integer accumulators, C[16, 8] += A[16, 32] * B[32, 8]: a0 and a1 hold
// A[g, 4q..] and A[g + 8, 4q..], a2 and a3 those of 4q + 16, b0 and b1 B[4q.., g] and B[4q + 16.., g].
// kSigned: A; B is.
template <bool kSigned>
__device__ __forceinline__ void mma_bytes(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                          uint32_t b0, uint32_t b1) {
  if constexpr (kSigned) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

// Two words that hold neighbors (x0, x1) and (y0, y1) give (x0, y0) and (x1, y1). That turns pieces of two
// matrix rows into an operand that pairs the rows.
__device__ __forceinline__ uint32_t pair_low(uint32_t x, uint32_t y) { return __byte_perm(x, y, 0x5410); }
__device__ __forceinline__ uint32_t pair_high(uint32_t x, uint32_t y) { return __byte_perm(x, y, 0x7632); }

// A[16, 16] out of four rows r0..r3 of a row-major matrix [k, n], of which a lane holds word w of its 16
// bytes, that is the neighbors n = 2w and 2w + 1 of its eight: rows pair up in k, n = 2w is row g and n = 2w
// + 1 row g + 8 of A.
template <class T>
__device__ __forceinline__ void mma_columns(float (&c)[4], uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3,
                                            uint32_t b0, uint32_t b1) {
  mma<T>(c, pair_low(r0, r1), pair_high(r0, r1), pair_low(r2, r3), pair_high(r2, r3), b0, b1);
}

}  // namespace hf_fastpath
