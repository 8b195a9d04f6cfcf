// What: softmax(scale * q @ K.T) @ V for 1 to 16 new tokens of one KV head over a chunk of its cache, and the merge
//   of chunks. Softmax, scores and sums in float32.
// Work split: the glue cuts every (batch row, KV head) into chunks of positions and gives a thread a contiguous
//   range of chunks. A chunk runs in blocks of 64 positions: scores of all query heads of the group (each K row is
//   converted once for three of them), online softmax over the block, product with V. While K is used the block's V
//   is prefetched, while V is used the next block's K.
// Traffic: K and V once, 2 * positions * head_dim * element size a KV head.
// Roofline: read bandwidth for groups of up to about four query rows, then arithmetic. not measured yet
#include "common/avx2_math.h"
#include "decode_attention/decode_attention_cpu.h"

namespace hf_fastpath {
namespace {

constexpr float kMinusInfinity = -__builtin_inff();

// ---- scores -------------------------------------------------------------------------------------------------------

// The sums of four registers, in order.
HF_INLINE __m128 sum_of_four(__m256 a, __m256 b, __m256 c, __m256 d) {
  const __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  return _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1));
}

// scores[m * kBlockPositions + p] = k[p] . q[m] for four rows of K and kM query rows.
template <class Kv, int kM>
HF_INLINE void score_tile(const typename Kv::Storage* k, const float* q, int64_t head_dim, float* scores) {
  __m256 sum[kM][4];
  for (int m = 0; m < kM; ++m) {
    for (int p = 0; p < 4; ++p) sum[m][p] = _mm256_setzero_ps();
  }
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    __m256 query[kM];
#pragma GCC unroll 4
    for (int m = 0; m < kM; ++m) query[m] = _mm256_loadu_ps(q + m * head_dim + d);
#pragma GCC unroll 4
    for (int p = 0; p < 4; ++p) {
      const __m256 key = Kv::load(k + p * head_dim + d);
#pragma GCC unroll 4
      for (int m = 0; m < kM; ++m) sum[m][p] = _mm256_fmadd_ps(key, query[m], sum[m][p]);
    }
  }
  for (int m = 0; m < kM; ++m) {
    _mm_storeu_ps(scores + m * kBlockPositions, sum_of_four(sum[m][0], sum[m][1], sum[m][2], sum[m][3]));
  }
}

// One row of K, same order of sums.
template <class Kv>
HF_INLINE float score_one(const typename Kv::Storage* k, const float* q, int64_t head_dim) {
  __m256 sum = _mm256_setzero_ps();
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    sum = _mm256_fmadd_ps(Kv::load(k + d), _mm256_loadu_ps(q + d), sum);
  }
  return _mm_cvtss_f32(sum_of_four(sum, sum, sum, sum));
}

HF_INLINE void prefetch_range(const char* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += kCacheLineBytes) _mm_prefetch(from + i, _MM_HINT_T0);
}

// Scores of `count` rows of K for all queries; prefetches as much of V.
template <class Kv>
void score_block(const typename Kv::Storage* k, const typename Kv::Storage* v, int64_t count, const float* q,
                 int64_t queries, int64_t head_dim, float* scores) {
  const int64_t tile_bytes = 4 * head_dim * static_cast<int64_t>(sizeof(typename Kv::Storage));
  int64_t p = 0;
  for (; p + 4 <= count; p += 4) {
    const auto* rows = k + p * head_dim;
    prefetch_range(reinterpret_cast<const char*>(v + p * head_dim), tile_bytes);
    int64_t m = 0;
    // Groups of three fill the registers; two pairs are better than three and one.
    for (; queries - m >= 3 && queries - m != 4; m += 3) {
      score_tile<Kv, 3>(rows, q + m * head_dim, head_dim, scores + m * kBlockPositions + p);
    }
    for (; queries - m >= 2; m += 2) {
      score_tile<Kv, 2>(rows, q + m * head_dim, head_dim, scores + m * kBlockPositions + p);
    }
    if (m < queries) score_tile<Kv, 1>(rows, q + m * head_dim, head_dim, scores + m * kBlockPositions + p);
  }
  for (; p < count; ++p) {
    for (int64_t m = 0; m < queries; ++m) {
      scores[m * kBlockPositions + p] = score_one<Kv>(k + p * head_dim, q + m * head_dim, head_dim);
    }
  }
}

// ---- softmax ------------------------------------------------------------------------------------------------------

// Turns the scores of one query at block positions [low, high) into exp(score - max), zero elsewhere in the block,
// and updates the query's running maximum, weight and sums.
HF_INLINE void softmax_block(float* scores, int64_t low, int64_t high, int64_t count, float scale, float* maximum,
                             float* weight, float* sums, int64_t head_dim) {
  const int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
  for (int64_t p = 0; p < low; ++p) scores[p] = kMinusInfinity;
  for (int64_t p = high; p < padded; ++p) scores[p] = kMinusInfinity;
  const __m256 factor = _mm256_set1_ps(scale);
  __m256 top = _mm256_set1_ps(kMinusInfinity);
  for (int64_t p = low / kLanes * kLanes; p < high; p += kLanes) {
    const __m256 inside = _mm256_and_ps(
        _mm256_castsi256_ps(lane_mask(min_of(kLanes, high - p))),
        _mm256_castsi256_ps(_mm256_andnot_si256(lane_mask(low - p), _mm256_set1_epi32(-1))));
    // Scaling must not touch the -infinity of masked lanes: a negative scale would turn it around.
    const __m256 score = _mm256_blendv_ps(_mm256_set1_ps(kMinusInfinity),
                                          _mm256_mul_ps(_mm256_loadu_ps(scores + p), factor), inside);
    _mm256_storeu_ps(scores + p, score);
    top = _mm256_max_ps(score, top);  // a NaN score loses against the second operand, and shows in exp below
  }
  const float block_top = horizontal_max(top);
  const float before = *maximum;
  const float now = block_top > before ? block_top : before;
  // With nothing visible so far the maximum is -infinity, and -infinity minus itself is NaN: subtract 0 then.
  const __m256 base = _mm256_set1_ps(now == kMinusInfinity ? 0.0f : now);
  __m256 total = _mm256_setzero_ps();
  for (int64_t p = 0; p < padded; p += kLanes) {
    const __m256 value = exp_ps(_mm256_sub_ps(_mm256_loadu_ps(scores + p), base));  // exactly 0 at -infinity
    _mm256_storeu_ps(scores + p, value);
    total = _mm256_add_ps(total, value);
  }
  float shrink = 1.0f;
  if (now != before) {  // before may be -infinity: exp gives 0 and the sums are 0
    shrink = before == kMinusInfinity ? 0.0f : _mm256_cvtss_f32(exp_ps(_mm256_set1_ps(before - now)));
    const __m256 by = _mm256_set1_ps(shrink);
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      _mm256_storeu_ps(sums + d, _mm256_mul_ps(_mm256_loadu_ps(sums + d), by));
    }
  }
  *weight = *weight * shrink + horizontal_sum(total);
  *maximum = now;
}

// ---- product with V -----------------------------------------------------------------------------------------------

// sums[m][d] += sum over count positions p of weights[m][p] * v[p][d], for kM queries and kVectors vectors of d.
template <class Kv, int kM, int kVectors>
HF_INLINE void value_tile(const typename Kv::Storage* v, int64_t count, const float* weights, int64_t head_dim,
                          float* sums) {
  __m256 sum[kM][kVectors];
  for (int m = 0; m < kM; ++m) {
    for (int i = 0; i < kVectors; ++i) sum[m][i] = _mm256_loadu_ps(sums + m * head_dim + i * kLanes);
  }
  for (int64_t p = 0; p < count; ++p) {
    __m256 value[kVectors];
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) value[i] = Kv::load(v + p * head_dim + i * kLanes);
#pragma GCC unroll 4
    for (int m = 0; m < kM; ++m) {
      const __m256 weight = _mm256_broadcast_ss(weights + m * kBlockPositions + p);
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) sum[m][i] = _mm256_fmadd_ps(value[i], weight, sum[m][i]);
    }
  }
  for (int m = 0; m < kM; ++m) {
    for (int i = 0; i < kVectors; ++i) _mm256_storeu_ps(sums + m * head_dim + i * kLanes, sum[m][i]);
  }
}

// kM queries over the whole of head_dim, in tiles of kVectors, 2 and 1 vectors.
template <class Kv, int kM, int kVectors>
HF_INLINE void value_rows(const typename Kv::Storage* v, int64_t count, const float* weights, int64_t head_dim,
                          float* sums) {
  int64_t d = 0;
  for (; d + kVectors * kLanes <= head_dim; d += kVectors * kLanes) {
    value_tile<Kv, kM, kVectors>(v + d, count, weights, head_dim, sums + d);
  }
  for (; d + 2 * kLanes <= head_dim; d += 2 * kLanes) {
    value_tile<Kv, kM, 2>(v + d, count, weights, head_dim, sums + d);
  }
  for (; d < head_dim; d += kLanes) value_tile<Kv, kM, 1>(v + d, count, weights, head_dim, sums + d);
}

template <class Kv>
void value_block(const typename Kv::Storage* v, int64_t count, const float* weights, int64_t queries,
                 int64_t head_dim, float* sums) {
  int64_t m = 0;
  for (; m + 4 <= queries; m += 4) {
    value_rows<Kv, 4, 2>(v, count, weights + m * kBlockPositions, head_dim, sums + m * head_dim);
  }
  for (; m + 2 <= queries; m += 2) {
    value_rows<Kv, 2, 4>(v, count, weights + m * kBlockPositions, head_dim, sums + m * head_dim);
  }
  if (m < queries) value_rows<Kv, 1, 8>(v, count, weights + m * kBlockPositions, head_dim, sums + m * head_dim);
}

// ---- chunk --------------------------------------------------------------------------------------------------------

template <class Kv>
void run_chunk(const AttentionChunk& chunk) {
  using Storage = typename Kv::Storage;
  const int64_t dim = chunk.head_dim, queries = chunk.query_len * chunk.group;
  for (int64_t m = 0; m < queries; ++m) {
    chunk.maxima[m] = kMinusInfinity;
    chunk.weights[m] = 0.0f;
    for (int64_t d = 0; d < dim; d += kLanes) _mm256_storeu_ps(chunk.sums + m * dim + d, _mm256_setzero_ps());
  }
  for (int64_t begin = chunk.begin; begin < chunk.end;) {
    const int64_t slot = begin % chunk.capacity;
    // A block ends where the ring does, so that its slots are contiguous.
    const int64_t count = min_of(min_of(kBlockPositions, chunk.end - begin), chunk.capacity - slot);
    const auto* k = static_cast<const Storage*>(chunk.k) + slot * dim;
    const auto* v = static_cast<const Storage*>(chunk.v) + slot * dim;
    score_block<Kv>(k, v, count, chunk.q, queries, dim, chunk.scratch);
    const int64_t next = min_of(kBlockPositions, min_of(chunk.end - begin, chunk.capacity - slot) - count);
    prefetch_range(reinterpret_cast<const char*>(k + count * dim), next * dim * static_cast<int64_t>(sizeof(Storage)));
    for (int64_t m = 0; m < queries; ++m) {
      const int64_t position = chunk.first_query + m / chunk.group;
      const int64_t oldest = chunk.window > 0 ? position - chunk.window + 1 : begin;
      const int64_t low = oldest > begin ? min_of(oldest - begin, count) : 0;
      int64_t high = min_of(position + 1 - begin, count);
      if (high < low) high = low;
      softmax_block(chunk.scratch + m * kBlockPositions, low, high, count, chunk.scale, chunk.maxima + m,
                    chunk.weights + m, chunk.sums + m * dim, dim);
    }
    value_block<Kv>(v, count, chunk.scratch, queries, dim, chunk.sums);
    begin += count;
  }
}

template <class Element>
void merge(const float* sums, const float* maxima, const float* weights, int64_t parts, int64_t sums_stride,
           int64_t stat_stride, int64_t head_dim, typename Element::Storage* out) {
  float top = kMinusInfinity;
  for (int64_t p = 0; p < parts; ++p) top = maxima[p * stat_stride] > top ? maxima[p * stat_stride] : top;
  const float base = top == kMinusInfinity ? 0.0f : top;
  const auto factor = [&](int64_t p) {
    const float maximum = maxima[p * stat_stride];
    return maximum == kMinusInfinity ? 0.0f : _mm256_cvtss_f32(exp_ps(_mm256_set1_ps(maximum - base)));
  };
  float total = 0.0f;
  for (int64_t p = 0; p < parts; ++p) total += weights[p * stat_stride] * factor(p);
  const __m256 inverse = _mm256_set1_ps(total == 0.0f ? 0.0f : 1.0f / total);
  // Parts are added in order for every vector; their factors are cheap beside the loads of a long context.
  for (int64_t d = 0; d < head_dim; d += 8 * kLanes) {
    __m256 sum[8];
    const int64_t vectors = min_of(8, (head_dim - d) / kLanes);
    for (int64_t i = 0; i < vectors; ++i) sum[i] = _mm256_setzero_ps();
    for (int64_t p = 0; p < parts; ++p) {
      const __m256 by = _mm256_set1_ps(factor(p));
      for (int64_t i = 0; i < vectors; ++i) {
        sum[i] = _mm256_fmadd_ps(_mm256_loadu_ps(sums + p * sums_stride + d + i * kLanes), by, sum[i]);
      }
    }
    for (int64_t i = 0; i < vectors; ++i) Element::store(out + d + i * kLanes, _mm256_mul_ps(sum[i], inverse));
  }
}

}  // namespace

void attention_chunk_avx2(const AttentionChunk& chunk) {
  with_element(chunk.kv_dtype, [&](auto kv) { run_chunk<decltype(kv)>(chunk); });
}

void attention_merge_avx2(DType dtype, const float* sums, const float* maxima, const float* weights, int64_t parts,
                          int64_t sums_stride, int64_t stat_stride, int64_t head_dim, void* out) {
  with_element(dtype, [=](auto element) {
    using Element = decltype(element);
    merge<Element>(sums, maxima, weights, parts, sums_stride, stat_stride, head_dim,
                   static_cast<typename Element::Storage*>(out));
  });
}

}  // namespace hf_fastpath
