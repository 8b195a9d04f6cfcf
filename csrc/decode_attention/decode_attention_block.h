// A chunk of decode attention, which decode_attention_avx2.cpp and decode_attention_avx512.cpp instantiate,
// each with its own vectors. Only kernels of decode attention include this file; linkage is
// internal as in avx2_math.h.
#pragma once

#include <type_traits>

#include "common/kv_quants_avx2.h"
#include "decode_attention/decode_attention_cpu.h"

namespace hf_fastpath {
namespace {

#define HF_ALWAYS_INLINE __attribute__((always_inline))

constexpr float kMinusInfinity = -__builtin_inff();
// So much of K is in a block: K and V of a block, and the K prefetched for the next, have to fit a 48 KiB
// first-level cache.
constexpr int64_t kBlockBytes = 16 * 1024;
// The same for four queries and more, whose tiles read a block again and again: 8 and 16 KiB are 2 to 15 %
// slower.
constexpr int64_t kSharedBlockBytes = 4 * 1024;
constexpr int kValueRows = 4;  // queries of a tile of the product with V
// Places of K and of V that a block comes from; also the rows of K of a score tile.
constexpr int64_t kStreams = 4;

// The positions of a block, in groups of four: position 4 * i + s of the block is row i * stride + s * apart
// of K or V. A block of adjacent positions has apart = 1 and stride = 4, one of four streams has stride = 1.
template <class Kv>
struct BlockRows {
  const typename Kv::Storage* base;
  int64_t apart, stride;  // elements
};

// The rows of positions p to p + 3.
template <class Kv>
HF_INLINE void prefetch_four(const BlockRows<Kv>& rows, int64_t p, int64_t head_dim) {
  constexpr int64_t kLine = kCacheLineBytes / static_cast<int64_t>(sizeof(typename Kv::Storage));
  const auto* row = rows.base + p / kStreams * rows.stride;
  for (int64_t i = 0; i < head_dim; i += kLine) {
#pragma GCC unroll 4
    for (int s = 0; s < kStreams; ++s) {
      _mm_prefetch(reinterpret_cast<const char*>(row + s * rows.apart + i), _MM_HINT_T0);
    }
  }
}

// The scales of such rows, in elements of themselves; null if they are not quantized.
struct BlockScales {
  const uint16_t* base;
  int64_t apart, stride;
};

// The scales of a block in the order of its positions, times what dequantized quants are short of; zeros up
// to whole vectors.
template <class Vector, class Kv>
HF_INLINE void load_scales(const BlockScales& scales, int64_t count, float* to) {
  const __m256 unit = _mm256_set1_ps(1.0f / Kv::kUnit);
  const uint16_t* base = scales.base;
  int64_t p = 0;
  if (scales.apart == 1) {  // adjacent positions
    for (; p + kLanes <= count; p += kLanes)
      _mm256_store_ps(to + p, _mm256_mul_ps(BF16::load(base + p), unit));
    base += p;
  } else {
    for (; p + 4 * kStreams <= count; p += 4 * kStreams, base += 4) {  // four of each stream
      __m128i four[kStreams];
#pragma GCC unroll 4
      for (int s = 0; s < kStreams; ++s) {
        four[s] = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(base + s * scales.apart));
      }
      const __m128i low = _mm_unpacklo_epi16(four[0], four[1]), high = _mm_unpacklo_epi16(four[2], four[3]);
      _mm256_store_ps(to + p, _mm256_mul_ps(BF16::widen(_mm_unpacklo_epi32(low, high)), unit));
      _mm256_store_ps(to + p + kLanes, _mm256_mul_ps(BF16::widen(_mm_unpackhi_epi32(low, high)), unit));
    }
  }
  const int64_t padded = (count + Vector::kWidth - 1) / Vector::kWidth * Vector::kWidth;
  for (; p < padded; p += kStreams, base += scales.stride) {
    for (int s = 0; s < kStreams; ++s) {
      const uint32_t bits = p + s < count ? uint32_t(base[s * scales.apart]) << 16 : 0;
      const __m128 scale = _mm_castsi128_ps(_mm_cvtsi32_si128(static_cast<int>(bits)));
      to[p + s] = _mm_cvtss_f32(scale) * (1.0f / Kv::kUnit);
    }
  }
}

// Calls body(m, rows, prefetch) for tiles of `rows` queries from query m on, of which the first prefetches.
template <int kMost, class Body>
HF_INLINE void for_query_tiles(int64_t queries, const Body& body) {
  constexpr std::integral_constant<int, kMost> most;
  constexpr std::integral_constant<int, 2> two;
  constexpr std::integral_constant<int, 1> one;
  constexpr std::true_type prefetch;
  constexpr std::false_type fetched;
  if (queries == 1) return body(0, one, prefetch);
  int64_t m = 0;
  // Two pairs are better than three and one.
  const auto fits = [&] { return queries - m >= kMost && (kMost != 3 || queries - m != 4); };
  if (fits()) {
    body(m, most, prefetch);
    m += kMost;
  } else {
    body(m, two, prefetch);
    m += 2;
  }
  for (; fits(); m += kMost) body(m, most, fetched);
  for (; queries - m >= 2; m += 2) body(m, two, fetched);
  if (m < queries) body(m, one, fetched);
}

// ---- scores -------------------------------------------------------------------------------------------

// scores[m * kBlockPositions + p] = k[p] . q[m] for four rows of K and kM query rows.
template <class Vector, class Kv, int kM>
HF_INLINE void score_tile(const typename Kv::Storage* k, int64_t apart, const float* q, int64_t head_dim,
                          float* scores) {
  typename Vector::Type sum[kM][kStreams];
  for (int m = 0; m < kM; ++m) {
    for (int p = 0; p < kStreams; ++p) sum[m][p] = Vector::zero();
  }
  for (int64_t d = 0; d < head_dim; d += Vector::kWidth) {
    typename Vector::Type query[kM];
#pragma GCC unroll 8
    for (int m = 0; m < kM; ++m) query[m] = Vector::template load<F32>(q + m * head_dim + d);
#pragma GCC unroll 4
    for (int p = 0; p < kStreams; ++p) {
      const auto key = Vector::template load<Kv>(k + p * apart + d);
#pragma GCC unroll 8
      for (int m = 0; m < kM; ++m) sum[m][p] = Vector::fma(key, query[m], sum[m][p]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < kM; ++m) {
    _mm_storeu_ps(scores + m * kBlockPositions,
                  Vector::sum_of_four(sum[m][0], sum[m][1], sum[m][2], sum[m][3]));
  }
}

// Scores of a block for kM queries; positions at the end that do not make four are multiplied one at a time.
// With kPrefetch, prefetches the rows `ahead` as it goes.
template <class Vector, class Kv, int kM, bool kPrefetch>
HF_INLINE void score_rows(const BlockRows<Kv>& k, int64_t count, const float* q, int64_t head_dim,
                          float* scores, const BlockRows<Kv>& ahead) {
  int64_t p = 0;
  const auto* rows = k.base;
  for (; p + kStreams <= count; p += kStreams, rows += k.stride) {
    if constexpr (kPrefetch) prefetch_four(ahead, p, head_dim);
    score_tile<Vector, Kv, kM>(rows, k.apart, q, head_dim, scores + p);
  }
  for (; p < count; ++p, rows += k.apart) {
    for (int m = 0; m < kM; ++m) {
      auto sum = Vector::zero();
      for (int64_t d = 0; d < head_dim; d += Vector::kWidth) {
        sum = Vector::fma(Vector::template load<Kv>(rows + d),
                          Vector::template load<F32>(q + m * head_dim + d), sum);
      }
      scores[m * kBlockPositions + p] = _mm_cvtss_f32(Vector::sum_of_four(sum, sum, sum, sum));
    }
  }
}

// Takes all queries; the first ones prefetch.
template <class Vector, class Kv>
void score_block(const BlockRows<Kv>& k, int64_t count, const float* q, int64_t queries, int64_t head_dim,
                 float* scores, const BlockRows<Kv>& ahead) {
  for_query_tiles<Vector::kScoreRows>(queries, [&](int64_t m, auto rows, auto prefetch) HF_ALWAYS_INLINE {
    score_rows<Vector, Kv, decltype(rows)::value, decltype(prefetch)::value>(
        k, count, q + m * head_dim, head_dim, scores + m * kBlockPositions, ahead);
  });
}

// ---- softmax ------------------------------------------------------------------------------------------

// exp(x) for x <= 0 within about one unit in the last place, exactly 0 below -87.7; NaN stays NaN. Steps as
// in exp_ps, of which this leaves out what only larger and subnormal results need.
template <class Vector>
HF_INLINE typename Vector::Type exp_of_negative(typename Vector::Type x) {
  x = Vector::max(Vector::set(-88.0f), x);  // the second operand if one is NaN
  // Adding this rounds to an integer n and leaves n + 127, the biased exponent, in the lowest bits.
  const auto rounding = Vector::set(0x1.8p23f + 127.0f);
  const auto shifted = Vector::fma(x, Vector::set(1.44269504f), rounding);
  const auto n = Vector::sub(shifted, rounding);
  auto r = Vector::fnma(n, Vector::set(0x1.62e4p-1f), x);
  r = Vector::fnma(n, Vector::set(0x1.7f7d1cp-20f), r);
  auto p = Vector::set(0x1.6a2350p-10f);
  p = Vector::fma(p, r, Vector::set(0x1.123a6cp-7f));
  p = Vector::fma(p, r, Vector::set(0x1.5558f4p-5f));
  p = Vector::fma(p, r, Vector::set(0x1.555490p-3f));
  p = Vector::fma(p, r, Vector::set(0x1.fffffcp-2f));
  p = Vector::add(Vector::fma(Vector::mul(r, r), p, r), Vector::set(1.0f));
  return Vector::mul(p, Vector::exponent(shifted));
}

// Scales the scores of one query at block positions [low, high), each with its factor too where there are
// any, makes the others -infinity, and returns the largest of them.
template <class Vector, bool kFactors>
HF_INLINE float scale_scores(float* scores, int64_t low, int64_t high, int64_t padded, float scale,
                             const float* factors) {
  constexpr int64_t kWidth = Vector::kWidth;
  const auto factor = Vector::set(scale);
  auto top = Vector::set(kMinusInfinity);
  if (low == 0 && high == padded) {
    for (int64_t p = 0; p < padded; p += kWidth) {
      auto score = Vector::mul(Vector::template load<F32>(scores + p), factor);
      if constexpr (kFactors) score = Vector::mul(score, Vector::template load<F32>(factors + p));
      Vector::store(scores + p, score);
      top = Vector::max(score, top);  // a NaN score loses against the second operand, and shows in exp below
    }
    return Vector::largest(top);
  }
  for (int64_t p = 0; p < padded; ++p) {  // not -infinity times scale, which may be negative
    const float by = kFactors ? scale * factors[p] : scale;
    scores[p] = p < low || p >= high ? kMinusInfinity : scores[p] * by;
  }
  for (int64_t p = 0; p < padded; p += kWidth) {
    top = Vector::max(Vector::template load<F32>(scores + p), top);
  }
  return Vector::largest(top);
}

// Adds the biases of one query to its scores. Position 4 * i + s of the block is `first` + i * stride +
// s * apart; positions behind `last`, in a tail that nobody sees, get any bias.
HF_INLINE void add_biases(float* scores, int64_t padded, const float* biases, int64_t distances,
                          int64_t first, int64_t apart, int64_t stride, int64_t last) {
  for (int64_t p = 0; p < padded; ++p) {
    const int64_t distance = last - (first + p / 4 * stride + p % 4 * apart);
    scores[p] += biases[distance < 0 ? 0 : min_of(distance, distances - 1)];
  }
}

// Scales, caps and slopes the scores of one query. Position 4 * i + s of the block is `first` + i * stride +
// s * apart; slopes count from `last`, where they have to be exact.
HF_INLINE void change_scores(const AttentionChunk& chunk, float* scores, int64_t padded, const float* factors,
                             float slope, int64_t first, int64_t apart, int64_t stride, int64_t last) {
  const __m256 scale = _mm256_set1_ps(chunk.scale), cap = _mm256_set1_ps(chunk.softcap);
  const __m256 steps = _mm256_set_ps(3, 2, 1, 0, 3, 2, 1, 0), groups = _mm256_set_ps(1, 1, 1, 1, 0, 0, 0, 0);
  __m256 distance = _mm256_set1_ps(static_cast<float>(first - last));
  distance = _mm256_fmadd_ps(steps, _mm256_set1_ps(static_cast<float>(apart)), distance);
  distance = _mm256_fmadd_ps(groups, _mm256_set1_ps(static_cast<float>(stride)), distance);
  for (int64_t p = 0; p < padded; p += kLanes) {
    __m256 score = _mm256_mul_ps(_mm256_loadu_ps(scores + p), scale);
    if (factors != nullptr) score = _mm256_mul_ps(score, _mm256_loadu_ps(factors + p));
    if (chunk.softcap > 0.0f) score = _mm256_mul_ps(tanh_ps(_mm256_div_ps(score, cap)), cap);
    score = _mm256_fmadd_ps(_mm256_set1_ps(slope), distance, score);
    _mm256_storeu_ps(scores + p, score);
    distance = _mm256_add_ps(distance, _mm256_set1_ps(static_cast<float>(2 * stride)));
  }
}

// Turns scaled scores into exp(score - max), times their factors where there are any, and updates the query's
// running maximum, weight and accumulators.
template <class Vector, bool kFactors>
HF_INLINE void weigh_scores(float* scores, int64_t padded, float block_top, float* maximum, float* weight,
                            float* accumulators, int64_t head_dim, const float* factors) {
  constexpr int64_t kWidth = Vector::kWidth;
  const float before = *maximum;
  const float now = block_top > before ? block_top : before;
  // With nothing visible so far the maximum is -infinity, and -infinity minus itself is NaN: subtract 0 then.
  const auto base = Vector::set(now == kMinusInfinity ? 0.0f : now);
  auto total = Vector::zero();
#pragma GCC unroll 4
  for (int64_t p = 0; p < padded; p += kWidth) {
    const auto value = exp_of_negative<Vector>(Vector::sub(Vector::template load<F32>(scores + p), base));
    total = Vector::add(total, value);
    if constexpr (kFactors) {
      Vector::store(scores + p, Vector::mul(value, Vector::template load<F32>(factors + p)));
    } else {
      Vector::store(scores + p, value);
    }
  }
  float shrink = 1.0f;
  if (now != before) {  // before may be -infinity: the accumulators are 0
    shrink = before == kMinusInfinity ? 0.0f : _mm256_cvtss_f32(exp_ps(_mm256_set1_ps(before - now)));
    const auto by = Vector::set(shrink);
    for (int64_t d = 0; d < head_dim; d += kWidth) {
      Vector::store(accumulators + d, Vector::mul(Vector::template load<F32>(accumulators + d), by));
    }
  }
  *weight = *weight * shrink + Vector::sum(total);
  *maximum = now;
}

// Attends with all queries to positions [position, position + count) if `length` is 0, else to four streams
// of that many positions, all visible. Scores and weights have factors, or both have none.
template <class Vector, bool kFactors>
void softmax_block(const AttentionChunk& chunk, int64_t count, int64_t length, int64_t position,
                   const float* of_scores, const float* of_weights) {
  constexpr int64_t kWidth = Vector::kWidth;
  const int64_t dim = chunk.head_dim, queries = chunk.query_len * chunk.group;
  const int64_t padded = (count + kWidth - 1) / kWidth * kWidth;
  float* const tops = chunk.scratch + queries * kBlockPositions;
  for (int64_t m = 0; m < queries; ++m) {
    int64_t low = 0, high = count;
    const int64_t last = chunk.first_query + m / chunk.group;
    if (length == 0) {
      const int64_t oldest = chunk.window > 0 ? last - chunk.window + 1 : position;
      low = oldest > position ? min_of(oldest - position, count) : 0;
      high = min_of(last + 1 - position, count);
      if (high < low) high = low;
    }
    float* const scores = chunk.scratch + m * kBlockPositions;
    if (chunk.softcap > 0.0f || chunk.slopes != nullptr || chunk.biases != nullptr) {
      const float slope = chunk.slopes != nullptr ? chunk.slopes[m % chunk.group] : 0.0f;
      const int64_t apart = length > 0 ? length : 1, stride = length > 0 ? 1 : kStreams;
      change_scores(chunk, scores, padded, of_scores, slope, position, apart, stride, last);
      if (chunk.biases != nullptr) {
        const float* const biases = chunk.biases + m * chunk.distances;
        add_biases(scores, padded, biases, chunk.distances, position, apart, stride, last);
      }
      tops[m] = scale_scores<Vector, false>(scores, low, high, padded, 1.0f, nullptr);
    } else {
      tops[m] = scale_scores<Vector, kFactors>(scores, low, high, padded, chunk.scale, of_scores);
    }
  }
  for (int64_t m = 0; m < queries; ++m) {
    weigh_scores<Vector, kFactors>(chunk.scratch + m * kBlockPositions, padded, tops[m], chunk.maxima + m,
                                   chunk.weights + m, chunk.accumulators + m * dim, dim, of_weights);
  }
}

// ---- product with V -----------------------------------------------------------------------------------

// accumulators[m][d] += sum over count positions p of weights[m][p] * v[p][d], for kM queries and kVectors
// vectors of d from `first` on. With kPrefetch, prefetches the rows `ahead` as it goes.
template <class Vector, class Kv, int kM, int kVectors, bool kPrefetch>
HF_INLINE void value_tile(const BlockRows<Kv>& v, int64_t first, int64_t count, const float* weights,
                          int64_t head_dim, float* accumulators, const BlockRows<Kv>& ahead) {
  constexpr int kWidth = Vector::kWidth;
  typename Vector::Type sum[kM][kVectors];
  for (int m = 0; m < kM; ++m) {
    for (int i = 0; i < kVectors; ++i) {
      sum[m][i] = Vector::template load<F32>(accumulators + m * head_dim + first + i * kWidth);
    }
  }
  const auto add = [&](int64_t p, const typename Kv::Storage* row) HF_ALWAYS_INLINE {
    typename Vector::Type value[kVectors];
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) value[i] = Vector::template load<Kv>(row + i * kWidth);
#pragma GCC unroll 8
    for (int m = 0; m < kM; ++m) {
      const auto weight = Vector::broadcast(weights + m * kBlockPositions + p);
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) sum[m][i] = Vector::fma(value[i], weight, sum[m][i]);
    }
  };
  int64_t p = 0;
  const auto* rows = v.base + first;
  for (; p + kStreams <= count; p += kStreams, rows += v.stride) {
    if constexpr (kPrefetch) prefetch_four(ahead, p, head_dim);
#pragma GCC unroll 4
    for (int s = 0; s < kStreams; ++s) add(p + s, rows + s * v.apart);
  }
  for (; p < count; ++p, rows += v.apart) add(p, rows);
  for (int m = 0; m < kM; ++m) {
    for (int i = 0; i < kVectors; ++i) {
      Vector::store(accumulators + m * head_dim + first + i * kWidth, sum[m][i]);
    }
  }
}

// kM queries over the whole of head_dim, in tiles of kVectors, 2 and 1 vectors.
template <class Vector, class Kv, int kM, int kVectors, bool kPrefetch>
HF_INLINE void value_rows(const BlockRows<Kv>& v, int64_t count, const float* weights, int64_t head_dim,
                          float* accumulators, const BlockRows<Kv>& ahead) {
  constexpr int kWidth = Vector::kWidth;
  int64_t d = 0;
  if (kPrefetch && head_dim >= kVectors * kWidth) {
    value_tile<Vector, Kv, kM, kVectors, kPrefetch>(v, 0, count, weights, head_dim, accumulators, ahead);
    d = kVectors * kWidth;
  }
  for (; d + kVectors * kWidth <= head_dim; d += kVectors * kWidth) {
    value_tile<Vector, Kv, kM, kVectors, false>(v, d, count, weights, head_dim, accumulators, ahead);
  }
  for (; d + 2 * kWidth <= head_dim; d += 2 * kWidth) {
    value_tile<Vector, Kv, kM, 2, false>(v, d, count, weights, head_dim, accumulators, ahead);
  }
  for (; d < head_dim; d += kWidth) {
    value_tile<Vector, Kv, kM, 1, false>(v, d, count, weights, head_dim, accumulators, ahead);
  }
}

// Takes all queries; the first ones prefetch.
template <class Vector, class Kv>
void value_block(const BlockRows<Kv>& v, int64_t count, const float* weights, int64_t queries,
                 int64_t head_dim, float* accumulators, const BlockRows<Kv>& ahead) {
  for_query_tiles<kValueRows>(queries, [&](int64_t m, auto rows, auto prefetch) HF_ALWAYS_INLINE {
    constexpr int kM = decltype(rows)::value;
    value_rows<Vector, Kv, kM, Vector::value_vectors(kM), decltype(prefetch)::value>(
        v, count, weights + m * kBlockPositions, head_dim, accumulators + m * head_dim, ahead);
  });
}

// ---- chunk --------------------------------------------------------------------------------------------

// One block: positions [position, position + count) if `length` is 0, else of four streams of that many
// positions, all visible to every query. `ahead`: rows of K that come next.
template <class Vector, class Kv>
void run_block(const AttentionChunk& chunk, const BlockRows<Kv>& k, const BlockRows<Kv>& v,
               const BlockRows<Kv>& ahead, const BlockScales& k_scales, const BlockScales& v_scales,
               int64_t count, int64_t length, int64_t position) {
  const int64_t dim = chunk.head_dim, queries = chunk.query_len * chunk.group;
  constexpr bool kMayStep = Vector::kWidth == 16 && std::is_same_v<Kv, I8>;
  const bool in_steps = kMayStep && chunk.q_steps != nullptr;
  const auto plain = [](const BlockRows<Kv>& rows) {
    return Int8Rows{reinterpret_cast<const int8_t*>(rows.base), rows.apart, rows.stride};
  };
  if (in_steps) {
    score_block_avx512_vnni(plain(k), count, chunk.q_steps, chunk.q_units, queries, dim, chunk.scratch,
                            plain(v));
  } else {
    score_block<Vector>(k, count, chunk.q, queries, dim, chunk.scratch, v);
  }
  if constexpr (kIsQuantized<Kv>) {
    alignas(64) float of_scores[kBlockPositions], of_weights[kBlockPositions];
    load_scales<Vector, Kv>(k_scales, count, of_scores);
    load_scales<Vector, Kv>(v_scales, count, of_weights);
    softmax_block<Vector, true>(chunk, count, length, position, of_scores, of_weights);
  } else {
    softmax_block<Vector, false>(chunk, count, length, position, nullptr, nullptr);
  }
  if (in_steps && value_block_avx512_vnni(plain(v), count, chunk.scratch, queries, dim, chunk.accumulators,
                                          plain(ahead))) {
    return;
  }
  value_block<Vector>(v, count, chunk.scratch, queries, dim, chunk.accumulators, ahead);
}

// Positions [begin, end), whose slots are contiguous; `streams` if every query sees all of them.
template <class Vector, class Kv>
void run_range(const AttentionChunk& chunk, int64_t begin, int64_t end, bool streams) {
  using Storage = typename Kv::Storage;
  const int64_t dim = chunk.head_dim, row_bytes = dim * static_cast<int64_t>(sizeof(Storage));
  const int64_t bytes = chunk.query_len * chunk.group < kValueRows ? kBlockBytes : kSharedBlockBytes;
  const int64_t fitting = (bytes / row_bytes + Vector::kWidth - 1) / Vector::kWidth * Vector::kWidth;
  const int64_t block = min_of(kBlockPositions, fitting);
  const int64_t slot = row_of(chunk, begin);
  const auto* k = static_cast<const Storage*>(chunk.k) + slot * dim;
  const auto* v = static_cast<const Storage*>(chunk.v) + slot * dim;
  const uint16_t* k_scales = kIsQuantized<Kv> ? chunk.k_scales + slot : nullptr;
  const uint16_t* v_scales = kIsQuantized<Kv> ? chunk.v_scales + slot : nullptr;
  const int64_t length = streams ? (end - begin) / kStreams : 0;  // of a stream
  // Behind a block come the next one's rows, or those of the next page or chunk, or at worst a few of no use.
  const auto* next_page = chunk.pages != nullptr && end < chunk.end
                              ? static_cast<const Storage*>(chunk.k) + row_of(chunk, end) * dim
                              : nullptr;
  const auto ahead = [&](int64_t behind, bool is_last, int64_t apart, int64_t stride) {
    return BlockRows<Kv>{is_last && next_page != nullptr ? next_page : k + behind * dim, apart, stride};
  };
  for (int64_t i = 0; i < length; i += block / kStreams) {
    const int64_t count = min_of(block, (length - i) * kStreams), behind = i + count / kStreams;
    run_block<Vector, Kv>(chunk, {k + i * dim, length * dim, dim}, {v + i * dim, length * dim, dim},
                          ahead(behind, behind >= length, length * dim, dim), {k_scales + i, length, 1},
                          {v_scales + i, length, 1}, count, length, begin + i);
  }
  for (int64_t i = length * kStreams; i < end - begin; i += block) {
    const int64_t count = min_of(block, end - begin - i), behind = i + count / kStreams * kStreams;
    run_block<Vector, Kv>(chunk, {k + i * dim, dim, kStreams * dim}, {v + i * dim, dim, kStreams * dim},
                          ahead(behind, i + count >= end - begin, dim, kStreams * dim),
                          {k_scales + i, 1, kStreams}, {v_scales + i, 1, kStreams}, count, 0, begin + i);
  }
}

template <class Vector, class Kv>
void run_chunk(const AttentionChunk& chunk) {
  const int64_t dim = chunk.head_dim, queries = chunk.query_len * chunk.group;
  for (int64_t m = 0; m < queries; ++m) {
    chunk.maxima[m] = kMinusInfinity;
    chunk.weights[m] = 0.0f;
  }
  for (int64_t i = 0; i < queries * dim; i += kLanes)
    _mm256_storeu_ps(chunk.accumulators + i, _mm256_setzero_ps());
  // Every query sees the positions from `common_begin` up to, not including, `common_end`.
  const int64_t common_end = chunk.first_query + 1;
  const int64_t newest = chunk.first_query + chunk.query_len - 1;
  const int64_t common_begin = chunk.window > 0 ? newest - chunk.window + 1 : chunk.begin;
  for (int64_t begin = chunk.begin; begin < chunk.end;) {
    // A range ends where the ring or a page does, and where visibility to all begins or ends.
    const int64_t together = chunk.pages != nullptr ? chunk.page_size : chunk.capacity;
    int64_t end = min_of(chunk.end, begin + together - begin % together);
    if (begin < common_begin) {
      end = min_of(end, common_begin);
    } else if (begin < common_end) {
      end = min_of(end, common_end);
    }
    run_range<Vector, Kv>(chunk, begin, end, begin >= common_begin && begin < common_end);
    begin = end;
  }
}

}  // namespace
}  // namespace hf_fastpath
