// What: out = x @ W.T for one row of x and a weight in Q4_0, scales among the quants or apart: the plain way
//   to read these layouts, to measure others against. For x in 16 bits, integers, as packed_gemv has them: x
//   is 16-bit steps of a size that each group of 32 inputs has for itself.
// Work split: a thread takes a range of outputs, one after the other, group by group.
// Traffic: 18 bytes for 32 weights, each once; x and outputs are small.
// Roofline: read bandwidth, beside some 16 instructions for 18 bytes. 58 % of R interleaved, 49 % apart, two
//   threads of a Xeon with AVX-512, 2026-11; packed_gemv there 90 %.
#include <cstring>

#include "common/avx2_math.h"
#include "q4_0_gemv/q4_0_gemv_cpu.h"

namespace hf_fastpath {
namespace {

constexpr int kChains = 4;  // sums side by side, so that none waits for the one before it
// How far ahead to prefetch: one page, since the hardware prefetchers stop at its end.
constexpr int64_t kAheadBytes = 4096;

HF_INLINE float float_of(const uint8_t* half) {
  uint16_t bits;
  std::memcpy(&bits, half, sizeof bits);
  return _cvtsh_ss(bits);
}

HF_INLINE float sum_of(__m256 lanes) {
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

// A group's quants less their zero: weights 0 to 15, and 16 to 31.
HF_INLINE void signed_quants(const uint8_t* quants, __m128i (&halves)[2]) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(quants));
  const __m128i four_bits = _mm_set1_epi8(15), zero = _mm_set1_epi8(kQ40Zero);
  halves[0] = _mm_sub_epi8(_mm_and_si128(bytes, four_bits), zero);
  halves[1] = _mm_sub_epi8(_mm_and_si128(_mm_srli_epi16(bytes, 4), four_bits), zero);
}

// The sum of weights but for the scale times x, in eight lanes.
HF_INLINE __m256 group_sums(const uint8_t* quants, const int16_t* steps) {
  __m128i halves[2];
  signed_quants(quants, halves);
  const auto* from = reinterpret_cast<const __m256i*>(steps);
  const __m256i low = _mm256_madd_epi16(_mm256_cvtepi8_epi16(halves[0]), _mm256_loadu_si256(from));
  const __m256i high = _mm256_madd_epi16(_mm256_cvtepi8_epi16(halves[1]), _mm256_loadu_si256(from + 1));
  return _mm256_cvtepi32_ps(_mm256_add_epi32(low, high));
}

HF_INLINE __m256 group_sums(const uint8_t* quants, const float* x) {
  __m128i halves[2];
  signed_quants(quants, halves);
  __m256 sum = _mm256_setzero_ps();
  for (int i = 0; i < 4; ++i) {
    const __m128i eight = i % 2 == 0 ? halves[i / 2] : _mm_srli_si128(halves[i / 2], 8);
    const __m256 values = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight));
    sum = _mm256_fmadd_ps(values, _mm256_loadu_ps(x + 8 * i), sum);
  }
  return sum;
}

// kBlockBytes: from one group's quants to the next's, kScaleBytes: the same of scales.
template <class Type, int64_t kBlockBytes, int64_t kScaleBytes, class Input>
void outputs(const Q40Args& args, const Input* x, const float* sizes, int64_t begin, int64_t end) {
  auto* out = static_cast<typename Type::Storage*>(args.out);
  for (int64_t row = begin; row < end; ++row) {
    const uint8_t* quants = args.quants_of(row, 0);
    const uint8_t* scales = args.scale_of(row, 0);
    __m256 totals[kChains] = {};
    const auto add = [&](int64_t group, __m256& total) {
      float size = float_of(scales + group * kScaleBytes);
      if (sizes != nullptr) size *= sizes[group];
      const __m256 sums = group_sums(quants + group * kBlockBytes, x + group * kQ40Group);
      total = _mm256_fmadd_ps(sums, _mm256_set1_ps(size), total);
    };
    int64_t group = 0;
    for (; group + kChains <= args.groups; group += kChains) {
      // Past the end of the weight it is ignored, never a fault.
      _mm_prefetch(reinterpret_cast<const char*>(quants + group * kBlockBytes + kAheadBytes), _MM_HINT_T0);
      if constexpr (kScaleBytes != kBlockBytes) {
        _mm_prefetch(reinterpret_cast<const char*>(scales + group * kScaleBytes + kAheadBytes / 8),
                     _MM_HINT_T0);
      }
#pragma GCC unroll 4
      for (int chain = 0; chain < kChains; ++chain) add(group + chain, totals[chain]);
    }
    for (; group < args.groups; ++group) add(group, totals[0]);
    for (int chain = 1; chain < kChains; ++chain) totals[0] = _mm256_add_ps(totals[0], totals[chain]);
    Type::store(out + row, _mm256_set1_ps(sum_of(totals[0])), 1);
  }
}

template <class Type>
void outputs_of(const Q40Args& args, int64_t begin, int64_t end) {
  const bool is_apart = args.scales != nullptr;
  if (args.steps != nullptr) {
    is_apart ? outputs<Type, kQ40QuantBytes, 2>(args, args.steps, args.sizes, begin, end)
             : outputs<Type, kQ40BlockBytes, kQ40BlockBytes>(args, args.steps, args.sizes, begin, end);
  } else {
    is_apart ? outputs<Type, kQ40QuantBytes, 2>(args, args.x, nullptr, begin, end)
             : outputs<Type, kQ40BlockBytes, kQ40BlockBytes>(args, args.x, nullptr, begin, end);
  }
}

}  // namespace

void q4_0_gemv_avx2(const Q40Args& args, int64_t begin, int64_t end) {
  if (args.dtype == DType::kFloat32) return outputs_of<F32>(args, begin, end);
  args.dtype == DType::kFloat16 ? outputs_of<F16>(args, begin, end) : outputs_of<BF16>(args, begin, end);
}

}  // namespace hf_fastpath
