// Element types on the device: conversions, 16-byte chunks, and the switch from a run-time type to a C++ one.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>

#include "common/dtype.h"

namespace hf_fastpath {

// Brings what lies at `p` into L2, without a register to wait for.
__device__ __forceinline__ void prefetch_l2(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// Two neighbors packed in 32 bits.
__device__ __forceinline__ float2 unpack2(uint32_t bits, __half) {
  return __half22float2(*reinterpret_cast<const __half2*>(&bits));
}
__device__ __forceinline__ float2 unpack2(uint32_t bits,
                                          __nv_bfloat16) {  // bfloat16 is the upper half of a float32
  return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
}
__device__ __forceinline__ uint32_t pack2(float a, float b, __half) {
  __half2 pair = __floats2half2_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ uint32_t pack2(float a, float b, __nv_bfloat16) {
  __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Elements in a 16-byte access.
template <class T>
constexpr int kVecElems = 16 / static_cast<int>(sizeof(T));

// What a thread moves in one access: kElems elements of T, either 16 bytes or, where rows are not aligned,
// one element. `Raw` is the value as loaded; conversion is separate so that loads can be issued ahead of
// their use.
template <class T, int kElems>
struct Chunk {
  static_assert(kElems == kVecElems<T>, "a chunk is 16 bytes or one element");
  using Raw = uint4;
  static __device__ __forceinline__ Raw zero() { return make_uint4(0, 0, 0, 0); }
  static __device__ __forceinline__ Raw load(const T* p) { return *reinterpret_cast<const uint4*>(p); }
  static __device__ __forceinline__ Raw load_readonly(const T* p) {
    return __ldg(reinterpret_cast<const uint4*>(p));
  }
  // Data that a kernel still running when this one started may have written: from L2, where it is.
  static __device__ __forceinline__ Raw load_l2(const T* p) {
    return __ldcg(reinterpret_cast<const uint4*>(p));
  }
  // Data used once: keeps out of L1, which is left to what is shared. Volatile, so that the compiler issues
  // the loads where they stand in the source and not next to their use. L2 fetches whole lines: a warp's load
  // that takes 64 bytes of each row finds the other half there.
  static __device__ __forceinline__ Raw load_streaming(const T* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
  }
  // The same, and L2 gives it up before anything else: many megabytes would drive out what the next kernels
  // read in each layer, their code among it.
  static __device__ __forceinline__ Raw load_once(const T* p) {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));  // one for all loads
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p), "l"(policy));
    return v;
  }
  // The same for data of which a kernel still running when this one started may have written a part.
  static __device__ __forceinline__ Raw load_streaming_l2(const T* p) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
  }
  // Read-only data that other warps of the SM read too; issued where it stands, like load_streaming.
  static __device__ __forceinline__ Raw load_shared_line(const T* p) {
    uint4 v;
    asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
  }
  static __device__ __forceinline__ void unpack(const Raw& raw, float (&f)[kElems]) {
    if constexpr (sizeof(T) == 4) {
      f[0] = __uint_as_float(raw.x), f[1] = __uint_as_float(raw.y);
      f[2] = __uint_as_float(raw.z), f[3] = __uint_as_float(raw.w);
    } else {
      const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack2(words[i], T());
        f[2 * i] = pair.x, f[2 * i + 1] = pair.y;
      }
    }
  }
  static __device__ __forceinline__ Raw pack(const float (&f)[kElems]) {
    if constexpr (sizeof(T) == 4) {
      return make_uint4(__float_as_uint(f[0]), __float_as_uint(f[1]), __float_as_uint(f[2]),
                        __float_as_uint(f[3]));
    } else {
      return make_uint4(pack2(f[0], f[1], T()), pack2(f[2], f[3], T()), pack2(f[4], f[5], T()),
                        pack2(f[6], f[7], T()));
    }
  }
  static __device__ __forceinline__ void store(T* p, const float (&f)[kElems]) {
    *reinterpret_cast<uint4*>(p) = pack(f);
  }
};

template <class T>
struct Chunk<T, 1> {
  using Raw = T;
  static __device__ __forceinline__ Raw zero() { return from_float<T>(0.f); }
  static __device__ __forceinline__ Raw load(const T* p) { return *p; }
  static __device__ __forceinline__ Raw load_readonly(const T* p) { return __ldg(p); }
  // Volatile, which __ldcg of 16-bit types is not: they may be loaded before a wait, or through a pointer
  // that is looked at only then.
  static __device__ __forceinline__ Raw load_l2(const T* p) {
    if constexpr (sizeof(T) == 4) {
      return __ldcg(p);
    } else {
      uint16_t bits;
      asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(bits) : "l"(p) : "memory");
      return *reinterpret_cast<const T*>(&bits);
    }
  }
  static __device__ __forceinline__ Raw load_streaming(const T* p) { return __ldg(p); }
  static __device__ __forceinline__ Raw load_once(const T* p) { return __ldg(p); }
  static __device__ __forceinline__ Raw load_shared_line(const T* p) {
    if constexpr (sizeof(T) == 4) {
      float v;
      asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(v) : "l"(p));
      return v;
    } else {
      uint16_t bits;
      asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(bits) : "l"(p));
      return *reinterpret_cast<const T*>(&bits);
    }
  }
  static __device__ __forceinline__ void unpack(const Raw& raw, float (&f)[1]) { f[0] = to_float(raw); }
  static __device__ __forceinline__ void store(T* p, const float (&f)[1]) { *p = from_float<T>(f[0]); }
};

// Whether `p` starts a 16-byte access.
inline bool is_aligned16(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// Calls `f` with a value of the C++ type that `dtype` names.
template <class F>
void with_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat32:
      return f(float());
    case DType::kFloat16:
      return f(__half());
    case DType::kBFloat16:
      return f(__nv_bfloat16());
  }
  throw std::runtime_error("hf_fastpath: unknown dtype");
}

// Reads or writes one element of a type known at run time: for the few elements a kernel touches once.
__device__ __forceinline__ float load_as_float(const void* p, int64_t i, DType dtype) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(p)[i];
  if (dtype == DType::kFloat16) return __half2float(static_cast<const __half*>(p)[i]);
  return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
}
// kElems (4 or 8) elements from element i on, which starts a whole access of that size; from L2, as load_l2.
template <int kElems>
__device__ __forceinline__ void load_as_floats(const void* p, int64_t i, DType dtype, float (&f)[kElems]) {
  static_assert(kElems == 4 || kElems == 8, "one or two accesses of 8 or 16 bytes");
  if (dtype == DType::kFloat32) {
#pragma unroll
    for (int e = 0; e < kElems; e += 4) {
      const float4 v = __ldcg(reinterpret_cast<const float4*>(static_cast<const float*>(p) + i + e));
      f[e] = v.x, f[e + 1] = v.y, f[e + 2] = v.z, f[e + 3] = v.w;
    }
    return;
  }
  uint32_t words[kElems / 2];
#pragma unroll
  for (int w = 0; w < kElems / 2; w += 2) {
    const uint2 v = __ldcg(reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(p) + i + 2 * w));
    words[w] = v.x, words[w + 1] = v.y;
  }
#pragma unroll
  for (int w = 0; w < kElems / 2; ++w) {
    const float2 pair =
        dtype == DType::kFloat16 ? unpack2(words[w], __half()) : unpack2(words[w], __nv_bfloat16());
    f[2 * w] = pair.x, f[2 * w + 1] = pair.y;
  }
}
__device__ __forceinline__ void store_from_float(void* p, int64_t i, DType dtype, float x) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(p)[i] = x;
  } else if (dtype == DType::kFloat16) {
    static_cast<__half*>(p)[i] = __float2half_rn(x);
  } else {
    static_cast<__nv_bfloat16*>(p)[i] = __float2bfloat16_rn(x);
  }
}

}  // namespace hf_fastpath
