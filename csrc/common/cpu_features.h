// What the kernels may use of this CPU, by name, and what they are tuned for. This file is free of torch.
// cpu_features_cpu.cpp has the names, and says how HF_FASTPATH_CPU chooses among them.
#pragma once

#include <cstdint>

namespace hf_fastpath {

// A set of features. Each constant below is one feature with all that it needs.
using CpuFeatures = uint32_t;

constexpr CpuFeatures kBaseline = 0;
constexpr CpuFeatures kF16c = 1u << 0;
constexpr CpuFeatures kAvx2 = 1u << 1 | kF16c;       // with FMA
constexpr CpuFeatures kAvx512 = 1u << 2 | kAvx2;     // F, BW, DQ and VL
constexpr CpuFeatures kVnni = 1u << 3 | kAvx512;     // products of bytes
constexpr CpuFeatures kBf16Dot = 1u << 4 | kAvx512;  // products of pairs of bfloat16
constexpr CpuFeatures kAmxInt8 = 1u << 5 | kAvx512;  // AMX: tiles that the system lets this process use
constexpr CpuFeatures kAmxBf16 = 1u << 6 | kAvx512;  // also with AVX-512's arithmetic in float16
constexpr CpuFeatures kAmxFp16 = 1u << 7 | kAmxBf16;
constexpr CpuFeatures kNeon = 1u << 8;
constexpr CpuFeatures kDotprod = 1u << 9 | kNeon;
constexpr CpuFeatures kI8mm = 1u << 10 | kNeon;

// What CPUs of this architecture may have. The build leaves out the other architectures' sources.
#if defined(__x86_64__)
constexpr CpuFeatures kArchitecture = kVnni | kBf16Dot | kAmxInt8 | kAmxFp16;
#elif defined(__aarch64__)
constexpr CpuFeatures kArchitecture = kDotprod | kI8mm;
#else
constexpr CpuFeatures kArchitecture = kBaseline;
#endif

constexpr bool is_possible(CpuFeatures needs) { return (needs & ~kArchitecture) == 0; }

// How CPUs that have the same features differ.
struct CpuTuning {
  const char* name;
  // Pairs of bfloat16 are multiplied in less time than they are widened: not by Intel's CPUs, which issue
  // half as many of these instructions as of FMAs, but have AMX.
  bool prefers_bf16_dot;
  // Own kernels of float32 are faster than PyTorch's product, which is MKL: on an AMD EPYC MKL takes 1.9 to
  // 2.5 times as long for 33 to 2048 rows, and 1.1 to 1.5 times as long as own kernels of AVX2.
  bool own_f32_gemm;
  // The CPU's prefetchers follow a few streams of memory on and on, as AMD's do. Intel's stop at the end of a
  // page.
  bool follows_streams;
  // Bytes ahead in a stream that a kernel asks for what it will read. What is asked for a page ahead is in
  // the way of prefetchers that follow streams.
  int64_t prefetch_bytes;
};

// Features that kernels use, and the tuning: decided once. The functions are not inline, as the linker could
// pick one that was compiled with AVX for the portable path.
//
// Raises:
//   std::runtime_error: HF_FASTPATH_CPU has a word that is no name. The next call decides again.
CpuFeatures cpu_features();
const CpuTuning& cpu_tuning();

// Whether kernels use all of `wanted`.
bool cpu_has(CpuFeatures wanted);

}  // namespace hf_fastpath
