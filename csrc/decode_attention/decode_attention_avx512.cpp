// What: a chunk of decode attention as in decode_attention_avx2.cpp, for head sizes that are a multiple of
//   16. decode_attention_block.h has the chunk, for vectors of 16 values here.
// Work split, Traffic: as there.
// Roofline: read bandwidth for up to four query rows a KV head, arithmetic for eight. Two threads, Xeon with
//   AMX, 2026-11, chunks of float16 out of memory that no cache holds, beside R = 29 to 31 GB/s: heads of 64
//   and 128 without groups, groups of 2 (64) and of 4 (128) 30 to 31 GB/s; groups of 8 (64) over 8000
//   positions 19.5 to 20.8. For such groups a position takes 20 ns, of which scores are half; half of the
//   scores' time goes to sums over lanes.
#include "common/avx512_math.h"
#include "decode_attention/decode_attention_block.h"

namespace hf_fastpath {
namespace {

struct Vector16 : Floats16 {
  static constexpr int kScoreRows = 4;  // 16 accumulators, four queries and a key of 32 registers
  static constexpr int value_vectors(int kM) { return 4; }
  template <class Kv>
  HF_INLINE Type load(const typename Kv::Storage* from) {
    if constexpr (std::is_same_v<Kv, F32>) {
      return _mm512_loadu_ps(from);
    } else if constexpr (std::is_same_v<Kv, I8>) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
      return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
    } else if constexpr (std::is_same_v<Kv, F8>) {  // as F8::load
      const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
      return _mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(short(0xbfff))));
    } else {
      const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
      if constexpr (std::is_same_v<Kv, F16>) return _mm512_cvtph_ps(bits);
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    }
  }
  HF_INLINE Type sub(Type a, Type b) { return _mm512_sub_ps(a, b); }
  HF_INLINE Type fnma(Type a, Type b, Type c) { return _mm512_fnmadd_ps(a, b, c); }
  HF_INLINE Type max(Type a, Type b) { return _mm512_max_ps(a, b); }
  // The lowest bits of every value as its exponent.
  HF_INLINE Type exponent(Type bits) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(bits), 23));
  }
  HF_INLINE float sum(Type values) { return horizontal_sum(half(values)); }
  HF_INLINE float largest(Type values) {
    return horizontal_max(_mm256_max_ps(_mm512_castps512_ps256(values), _mm512_extractf32x8_ps(values, 1)));
  }
  // a0 + a2, b0 + b2, a1 + a3, b1 + b3 of every four values.
  HF_INLINE Type interleaved_sum(Type a, Type b) {
    return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  }
  // The sums of four registers, in order.
  HF_INLINE __m128 sum_of_four(Type a, Type b, Type c, Type d) {
    const __m512d first = _mm512_castps_pd(interleaved_sum(a, b)),
                  second = _mm512_castps_pd(interleaved_sum(c, d));
    const __m512 sums = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(first, second)),
                                      _mm512_castpd_ps(_mm512_unpackhi_pd(first, second)));
    const __m256 eight = half(sums);
    return _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  }
};

}  // namespace

void attention_chunk_avx512(const AttentionChunk& chunk) {
  with_kv_element(chunk.kv_type, [&](auto kv) { run_chunk<Vector16, decltype(kv)>(chunk); });
}

}  // namespace hf_fastpath
