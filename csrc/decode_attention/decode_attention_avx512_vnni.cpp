// What: scores and product with V of a block of decode attention over an int8 cache, in integers, for q in 16
//   bits. q and the weights of V (with V's scales in them) are 16-bit steps of a size that each query has for
//   itself, the largest magnitude over 32767: finer than what float16 and bfloat16 round to. Products and
//   their sums over a head, or a block, are exact.
// Work split: that of decode_attention_block.h for the block. An instruction multiplies 32 quants: of a head
//   by steps of q, or of two positions, interleaved, by steps of two weights.
// Traffic: as in decode_attention_avx2.cpp.
// Roofline: read bandwidth for up to four query rows a KV head, arithmetic for eight. Integers take half
//   as many instructions as float32, which needs two conversions for 16 values of int8.
#include "decode_attention/decode_attention_block.h"

namespace hf_fastpath {
namespace {

constexpr int64_t kQuants = 32;  // of an instruction
constexpr float kMostSteps = 32767.0f;
constexpr float kLeastWeight = 1e-30f;  // below which the inverse of a step may overflow

HF_INLINE __m512i words(const int8_t* from) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

// a0 + a2, b0 + b2, a1 + a3, b1 + b3 of every four values.
HF_INLINE __m512i interleaved_sum(__m512i a, __m512i b) {
  return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
}

// The sums of four registers, in order.
HF_INLINE __m128 sum_of_four(__m512i a, __m512i b, __m512i c, __m512i d) {
  const __m512i first = interleaved_sum(a, b), second = interleaved_sum(c, d);
  const __m512i sums =
      _mm512_add_epi32(_mm512_unpacklo_epi64(first, second), _mm512_unpackhi_epi64(first, second));
  const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(sums), _mm512_extracti64x4_epi64(sums, 1));
  return _mm_cvtepi32_ps(_mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)));
}

template <int kM, bool kPrefetch>
HF_INLINE void score_rows(const BlockRows<I8>& k, int64_t count, const int16_t* q, const float* units,
                          int64_t head_dim, float* scores, const BlockRows<I8>& ahead) {
  const int8_t* rows = k.base;
  for (int64_t p = 0; p < count; p += kStreams, rows += k.stride) {
    if constexpr (kPrefetch) prefetch_four(ahead, p, head_dim);
    // Positions behind the last are the last again; nobody looks at their scores.
    const int64_t last = min_of(kStreams, count - p) - 1;
    __m512i sum[kM][kStreams];
    for (int m = 0; m < kM; ++m) {
      for (int s = 0; s < kStreams; ++s) sum[m][s] = _mm512_setzero_si512();
    }
    for (int64_t d = 0; d < head_dim; d += kQuants) {
      __m512i query[kM];
#pragma GCC unroll 4
      for (int m = 0; m < kM; ++m) query[m] = _mm512_loadu_si512(q + m * head_dim + d);
#pragma GCC unroll 4
      for (int s = 0; s < kStreams; ++s) {
        const __m512i key = words(rows + min_of(s, last) * k.apart + d);
#pragma GCC unroll 4
        for (int m = 0; m < kM; ++m) sum[m][s] = _mm512_dpwssd_epi32(sum[m][s], key, query[m]);
      }
    }
#pragma GCC unroll 4
    for (int m = 0; m < kM; ++m) {
      const __m128 sums = sum_of_four(sum[m][0], sum[m][1], sum[m][2], sum[m][3]);
      _mm_storeu_ps(scores + m * kBlockPositions + p, _mm_mul_ps(sums, _mm_set1_ps(units[m])));
    }
  }
}

HF_INLINE float largest(const float* weights, int64_t count) {
  __m512 top = _mm512_setzero_ps();
  for (int64_t p = 0; p < count; p += 16) top = _mm512_max_ps(_mm512_loadu_ps(weights + p), top);
  return _mm512_reduce_max_ps(top);
}

// Whether every weight is finite, and steps can be: the largest is not tiny.
HF_INLINE bool has_steps(const float* weights, int64_t count) {
  const __m512 infinity = _mm512_set1_ps(__builtin_inff());
  __mmask16 odd = 0;
  for (int64_t p = 0; p < count; p += 16) {
    odd |= _mm512_cmp_ps_mask(_mm512_loadu_ps(weights + p), infinity, _CMP_NLT_UQ);  // of NaN, too
  }
  const float top = largest(weights, count);
  return odd == 0 && (top == 0.0f || top > kLeastWeight);
}

// Weights of one query as steps; returns the size of one.
HF_INLINE float steps_of(const float* weights, int64_t count, int16_t* steps) {
  const float top = largest(weights, count);
  const __m512 inverse = _mm512_set1_ps(top > 0.0f ? kMostSteps / top : 0.0f);
  for (int64_t p = 0; p < count; p += 16) {
    const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(weights + p), inverse));
    _mm256_store_si256(reinterpret_cast<__m256i*>(steps + p), _mm512_cvtepi32_epi16(whole));
  }
  return top / kMostSteps;
}

// accumulators[m][d] += sum over positions p of steps[m][p] * v[p][d] * units[m], for kM queries and kBlocks
// * 32 of d from `first` on.
template <int kM, int kBlocks, bool kPrefetch>
HF_INLINE void value_tile(const BlockRows<I8>& v, int64_t first, int64_t count, const int16_t* steps,
                          const float* units, int64_t head_dim, float* accumulators,
                          const BlockRows<I8>& ahead) {
  __m512i sum[kM][kBlocks][2];  // of each four of eight dims, the lower and the upper
  for (int m = 0; m < kM; ++m) {
    for (int b = 0; b < kBlocks; ++b) sum[m][b][0] = sum[m][b][1] = _mm512_setzero_si512();
  }
  const auto add = [&](int64_t p, const int8_t* row, const int8_t* next) HF_ALWAYS_INLINE {
    __m512i pair[kBlocks][2];
#pragma GCC unroll 2
    for (int b = 0; b < kBlocks; ++b) {
      const __m512i one = words(row + b * kQuants), other = words(next + b * kQuants);
      pair[b][0] = _mm512_unpacklo_epi16(one, other);
      pair[b][1] = _mm512_unpackhi_epi16(one, other);
    }
#pragma GCC unroll 4
    for (int m = 0; m < kM; ++m) {
      int weights;
      std::memcpy(&weights, steps + m * kBlockPositions + p, sizeof(weights));
      const __m512i weight = _mm512_set1_epi32(weights);
#pragma GCC unroll 2
      for (int b = 0; b < kBlocks; ++b) {
        sum[m][b][0] = _mm512_dpwssd_epi32(sum[m][b][0], pair[b][0], weight);
        sum[m][b][1] = _mm512_dpwssd_epi32(sum[m][b][1], pair[b][1], weight);
      }
    }
  };
  int64_t p = 0;
  const int8_t* rows = v.base + first;
  for (; p + kStreams <= count; p += kStreams, rows += v.stride) {
    if constexpr (kPrefetch) prefetch_four(ahead, p, head_dim);
    add(p, rows, rows + v.apart);
    add(p + 2, rows + 2 * v.apart, rows + 3 * v.apart);
  }
  for (; p < count; p += 2, rows += 2 * v.apart) add(p, rows, p + 1 < count ? rows + v.apart : rows);
  const __m512i front = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i back = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  for (int m = 0; m < kM; ++m) {
    const __m512 unit = _mm512_set1_ps(units[m]);
    for (int b = 0; b < kBlocks; ++b) {
      const __m512 lower = _mm512_cvtepi32_ps(sum[m][b][0]), upper = _mm512_cvtepi32_ps(sum[m][b][1]);
      float* to = accumulators + m * head_dim + first + b * kQuants;
      const __m512 made[2] = {_mm512_permutex2var_ps(lower, front, upper),
                              _mm512_permutex2var_ps(lower, back, upper)};
      for (int i = 0; i < 2; ++i) {
        _mm512_storeu_ps(to + 16 * i, _mm512_fmadd_ps(made[i], unit, _mm512_loadu_ps(to + 16 * i)));
      }
    }
  }
}

template <int kM, bool kPrefetch>
HF_INLINE void value_rows(const BlockRows<I8>& v, int64_t count, const float* weights, int64_t head_dim,
                          float* accumulators, const BlockRows<I8>& ahead) {
  alignas(64) int16_t steps[kM * kBlockPositions];
  float units[kM];
  const int64_t padded = (count + 15) / 16 * 16;  // where weights are zero
  for (int m = 0; m < kM; ++m) {
    units[m] = steps_of(weights + m * kBlockPositions, padded, steps + m * kBlockPositions);
  }
  int64_t d = 0;
  if (head_dim >= 2 * kQuants) {
    value_tile<kM, 2, kPrefetch>(v, 0, count, steps, units, head_dim, accumulators, ahead);
    d = 2 * kQuants;
  }
  for (; d + 2 * kQuants <= head_dim; d += 2 * kQuants) {
    value_tile<kM, 2, false>(v, d, count, steps, units, head_dim, accumulators, ahead);
  }
  for (; d < head_dim; d += kQuants) {
    value_tile<kM, 1, false>(v, d, count, steps, units, head_dim, accumulators, ahead);
  }
}

BlockRows<I8> rows_of(const Int8Rows& rows) { return {rows.base, rows.apart, rows.stride}; }

}  // namespace

void score_block_avx512_vnni(const Int8Rows& k, int64_t count, const int16_t* q, const float* units,
                             int64_t queries, int64_t head_dim, float* scores, const Int8Rows& ahead) {
  for_query_tiles<4>(queries, [&](int64_t m, auto rows, auto prefetch) HF_ALWAYS_INLINE {
    score_rows<decltype(rows)::value, decltype(prefetch)::value>(
        rows_of(k), count, q + m * head_dim, units + m, head_dim, scores + m * kBlockPositions,
        rows_of(ahead));
  });
}

bool value_block_avx512_vnni(const Int8Rows& v, int64_t count, const float* weights, int64_t queries,
                             int64_t head_dim, float* accumulators, const Int8Rows& ahead) {
  for (int64_t m = 0; m < queries; ++m) {
    if (!has_steps(weights + m * kBlockPositions, (count + 15) / 16 * 16)) return false;
  }
  for_query_tiles<kValueRows>(queries, [&](int64_t m, auto rows, auto prefetch) HF_ALWAYS_INLINE {
    value_rows<decltype(rows)::value, decltype(prefetch)::value>(rows_of(v), count,
                                                                 weights + m * kBlockPositions, head_dim,
                                                                 accumulators + m * head_dim, rows_of(ahead));
  });
  return true;
}

}  // namespace hf_fastpath
