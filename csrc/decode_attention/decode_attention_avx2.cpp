// What: softmax(scale * q @ K.T) @ V for 1 to 16 new tokens of one KV head over a chunk of its cache, and the
//   merge of chunks. Softmax, scores and sums in float32.
// Work split: the glue cuts every (batch row, KV head) into chunks of positions and gives a thread a
//   contiguous range of chunks. A chunk runs in blocks of up to 64 positions: scores of all query heads of
//   the group, online softmax over the block, product with V. A block takes its positions from four places of
//   the chunk, so that K and V are read as eight streams, which keeps more of the hardware prefetchers busy
//   than two. While K is used the block's V is prefetched, while V is used the next block's K.
// Traffic: K and V once, 2 * positions * head_dim * element size a KV head.
// Roofline: read bandwidth for one query row a KV head, arithmetic from four on. Of the read bandwidth (two
//   threads, 29 GB/s, Xeon 2.8 GHz, 2026-11): 73 to 83 % for 32 heads of 128 without groups at 2048
//   positions, 43 to 63 % for groups of 4, 21 to 25 % (16-bit types) and 45 % (float32) for groups of 8 with
//   heads of 64.
#include "common/avx2_math.h"
#include "decode_attention/decode_attention_cpu.h"

namespace hf_fastpath {
namespace {

constexpr float kMinusInfinity = -__builtin_inff();
// Of K in a block: K and V of a block, and the K prefetched for the next, have to fit a 48 KiB first-level
// cache.
constexpr int64_t kBlockBytes = 16 * 1024;
constexpr int64_t kStreams =
    4;  // places of K and of V that a block comes from; also the rows of K of a score tile

// ---- scores -------------------------------------------------------------------------------------------

// The sums of four registers, in order.
HF_INLINE __m128 sum_of_four(__m256 a, __m256 b, __m256 c, __m256 d) {
  const __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  return _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1));
}

// scores[m * kBlockPositions + p] = k[p] . q[m] for four rows of K and kM query rows.
template <class Kv, int kM>
HF_INLINE void score_tile(const typename Kv::Storage* k, int64_t apart, const float* q, int64_t head_dim,
                          float* scores) {
  __m256 sum[kM][kStreams];
  for (int m = 0; m < kM; ++m) {
    for (int p = 0; p < kStreams; ++p) sum[m][p] = _mm256_setzero_ps();
  }
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    __m256 query[kM];
#pragma GCC unroll 4
    for (int m = 0; m < kM; ++m) query[m] = _mm256_loadu_ps(q + m * head_dim + d);
#pragma GCC unroll 4
    for (int p = 0; p < kStreams; ++p) {
      const __m256 key = Kv::load(k + p * apart + d);
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

// The positions of a block, in groups of four: position 4 * i + s of the block is row i * step + s * apart of
// K or V. A block of adjacent positions has apart = 1 and step = 4, one of four streams has step = 1.
template <class Kv>
struct BlockRows {
  const typename Kv::Storage* base;
  int64_t apart, step;  // elements
  const typename Kv::Storage* row(int64_t p) const {
    return base + p % kStreams * apart + p / kStreams * step;
  }
};

template <class Kv>
HF_INLINE void prefetch_row(const typename Kv::Storage* row, int64_t elements) {
  constexpr int64_t kLine = kCacheLineBytes / static_cast<int64_t>(sizeof(*row));
  for (int64_t i = 0; i < elements; i += kLine)
    _mm_prefetch(reinterpret_cast<const char*>(row + i), _MM_HINT_T0);
}

// Scores of a block for all queries; prefetches its V.
template <class Kv>
void score_block(const BlockRows<Kv>& k, const BlockRows<Kv>& v, int64_t count, const float* q,
                 int64_t queries, int64_t head_dim, float* scores) {
  int64_t p = 0;
  for (; p + kStreams <= count; p += kStreams) {
    const auto* rows = k.row(p);
    for (int s = 0; s < kStreams; ++s) prefetch_row<Kv>(v.row(p + s), head_dim);
    int64_t m = 0;
    // Groups of three fill the registers; two pairs are better than three and one.
    for (; queries - m >= 3 && queries - m != 4; m += 3) {
      score_tile<Kv, 3>(rows, k.apart, q + m * head_dim, head_dim, scores + m * kBlockPositions + p);
    }
    for (; queries - m >= 2; m += 2) {
      score_tile<Kv, 2>(rows, k.apart, q + m * head_dim, head_dim, scores + m * kBlockPositions + p);
    }
    if (m < queries)
      score_tile<Kv, 1>(rows, k.apart, q + m * head_dim, head_dim, scores + m * kBlockPositions + p);
  }
  for (; p < count; ++p) {
    for (int64_t m = 0; m < queries; ++m) {
      scores[m * kBlockPositions + p] = score_one<Kv>(k.row(p), q + m * head_dim, head_dim);
    }
  }
}

// ---- softmax ------------------------------------------------------------------------------------------

// Turns the scores of one query at block positions [low, high) into exp(score - max), zero elsewhere in the
// block, and updates the query's running maximum, weight and sums.
HF_INLINE void softmax_block(float* scores, int64_t low, int64_t high, int64_t count, float scale,
                             float* maximum, float* weight, float* sums, int64_t head_dim) {
  const int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
  for (int64_t p = 0; p < low; ++p) scores[p] = kMinusInfinity;
  for (int64_t p = high; p < padded; ++p) scores[p] = kMinusInfinity;
  const __m256 factor = _mm256_set1_ps(scale);
  __m256 top = _mm256_set1_ps(kMinusInfinity);
  for (int64_t p = low / kLanes * kLanes; p < high; p += kLanes) {
    const __m256 inside =
        _mm256_and_ps(_mm256_castsi256_ps(lane_mask(min_of(kLanes, high - p))),
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

// ---- product with V -----------------------------------------------------------------------------------

// sums[m][d] += sum over count positions p of weights[m][p] * v[p][d], for kM queries and kVectors vectors of
// d from `first` on. With kPrefetch, prefetches the rows `ahead` as it goes.
template <class Kv, int kM, int kVectors, bool kPrefetch>
HF_INLINE void value_tile(const BlockRows<Kv>& v, int64_t first, int64_t count, const float* weights,
                          int64_t head_dim, float* sums, const BlockRows<Kv>& ahead) {
  __m256 sum[kM][kVectors];
  for (int m = 0; m < kM; ++m) {
    for (int i = 0; i < kVectors; ++i) sum[m][i] = _mm256_loadu_ps(sums + m * head_dim + first + i * kLanes);
  }
  const auto step = [&](int64_t p, const typename Kv::Storage* row) __attribute__((always_inline)) {
    __m256 value[kVectors];
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) value[i] = Kv::load(row + i * kLanes);
#pragma GCC unroll 4
    for (int m = 0; m < kM; ++m) {
      const __m256 weight = _mm256_broadcast_ss(weights + m * kBlockPositions + p);
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i) sum[m][i] = _mm256_fmadd_ps(value[i], weight, sum[m][i]);
    }
  };
  int64_t p = 0;
  const auto* rows = v.base + first;
  for (; p + kStreams <= count; p += kStreams, rows += v.step) {
#pragma GCC unroll 4
    for (int s = 0; s < kStreams; ++s) {
      if constexpr (kPrefetch) prefetch_row<Kv>(ahead.row(p + s), head_dim);
      step(p + s, rows + s * v.apart);
    }
  }
  for (; p < count; ++p, rows += v.apart) step(p, rows);
  for (int m = 0; m < kM; ++m) {
    for (int i = 0; i < kVectors; ++i) _mm256_storeu_ps(sums + m * head_dim + first + i * kLanes, sum[m][i]);
  }
}

// kM queries over the whole of head_dim, in tiles of kVectors, 2 and 1 vectors.
template <class Kv, int kM, int kVectors, bool kPrefetch>
HF_INLINE void value_rows(const BlockRows<Kv>& v, int64_t count, const float* weights, int64_t head_dim,
                          float* sums, const BlockRows<Kv>& ahead) {
  int64_t d = 0;
  if (kPrefetch && head_dim >= kVectors * kLanes) {
    value_tile<Kv, kM, kVectors, kPrefetch>(v, 0, count, weights, head_dim, sums, ahead);
    d = kVectors * kLanes;
  }
  for (; d + kVectors * kLanes <= head_dim; d += kVectors * kLanes) {
    value_tile<Kv, kM, kVectors, false>(v, d, count, weights, head_dim, sums, ahead);
  }
  for (; d + 2 * kLanes <= head_dim; d += 2 * kLanes) {
    value_tile<Kv, kM, 2, false>(v, d, count, weights, head_dim, sums, ahead);
  }
  for (; d < head_dim; d += kLanes) value_tile<Kv, kM, 1, false>(v, d, count, weights, head_dim, sums, ahead);
}

// All queries; the first ones prefetch.
template <class Kv>
void value_block(const BlockRows<Kv>& v, int64_t count, const float* weights, int64_t queries,
                 int64_t head_dim, float* sums, const BlockRows<Kv>& ahead) {
  if (queries == 1) return value_rows<Kv, 1, 8, true>(v, count, weights, head_dim, sums, ahead);
  if (queries < 4) {
    value_rows<Kv, 2, 4, true>(v, count, weights, head_dim, sums, ahead);
    if (queries == 2) return;
    return value_rows<Kv, 1, 8, false>(v, count, weights + 2 * kBlockPositions, head_dim, sums + 2 * head_dim,
                                       ahead);
  }
  value_rows<Kv, 4, 2, true>(v, count, weights, head_dim, sums, ahead);
  int64_t m = 4;
  for (; m + 4 <= queries; m += 4) {
    value_rows<Kv, 4, 2, false>(v, count, weights + m * kBlockPositions, head_dim, sums + m * head_dim,
                                ahead);
  }
  for (; m + 2 <= queries; m += 2) {
    value_rows<Kv, 2, 4, false>(v, count, weights + m * kBlockPositions, head_dim, sums + m * head_dim,
                                ahead);
  }
  if (m < queries) {
    value_rows<Kv, 1, 8, false>(v, count, weights + m * kBlockPositions, head_dim, sums + m * head_dim,
                                ahead);
  }
}

// ---- chunk --------------------------------------------------------------------------------------------

// One block: positions [position, position + count) if adjacent, else all visible to every query.
template <class Kv>
void run_block(const AttentionChunk& chunk, const BlockRows<Kv>& k, const BlockRows<Kv>& v, int64_t count,
               bool adjacent, int64_t position) {
  const int64_t dim = chunk.head_dim, queries = chunk.query_len * chunk.group;
  score_block<Kv>(k, v, count, chunk.q, queries, dim, chunk.scratch);
  for (int64_t m = 0; m < queries; ++m) {
    int64_t low = 0, high = count;
    if (adjacent) {
      const int64_t last = chunk.first_query + m / chunk.group;
      const int64_t oldest = chunk.window > 0 ? last - chunk.window + 1 : position;
      low = oldest > position ? min_of(oldest - position, count) : 0;
      high = min_of(last + 1 - position, count);
      if (high < low) high = low;
    }
    softmax_block(chunk.scratch + m * kBlockPositions, low, high, count, chunk.scale, chunk.maxima + m,
                  chunk.weights + m, chunk.sums + m * dim, dim);
  }
  // The rows behind this block: the next one's, or those of the next chunk, or at worst a few of no use.
  const BlockRows<Kv> ahead{k.base + count / kStreams * k.step, k.apart, k.step};
  value_block<Kv>(v, count, chunk.scratch, queries, dim, chunk.sums, ahead);
}

// Positions [begin, end), whose slots are contiguous; `streams` if every query sees all of them.
template <class Kv>
void run_range(const AttentionChunk& chunk, int64_t begin, int64_t end, bool streams) {
  using Storage = typename Kv::Storage;
  const int64_t dim = chunk.head_dim;
  const int64_t fitting = kBlockBytes / (dim * static_cast<int64_t>(sizeof(Storage))) / kLanes * kLanes;
  const int64_t block = min_of(kBlockPositions, fitting);
  const int64_t slot = begin % chunk.capacity;
  const auto* k = static_cast<const Storage*>(chunk.k) + slot * dim;
  const auto* v = static_cast<const Storage*>(chunk.v) + slot * dim;
  const int64_t length = streams ? (end - begin) / kStreams : 0;  // of a stream
  for (int64_t i = 0; i < length; i += block / kStreams) {
    const int64_t count = min_of(block, (length - i) * kStreams);
    run_block<Kv>(chunk, {k + i * dim, length * dim, dim}, {v + i * dim, length * dim, dim}, count, false, 0);
  }
  for (int64_t i = length * kStreams; i < end - begin; i += block) {
    run_block<Kv>(chunk, {k + i * dim, dim, kStreams * dim}, {v + i * dim, dim, kStreams * dim},
                  min_of(block, end - begin - i), true, begin + i);
  }
}

template <class Kv>
void run_chunk(const AttentionChunk& chunk) {
  const int64_t dim = chunk.head_dim, queries = chunk.query_len * chunk.group;
  for (int64_t m = 0; m < queries; ++m) {
    chunk.maxima[m] = kMinusInfinity;
    chunk.weights[m] = 0.0f;
    for (int64_t d = 0; d < dim; d += kLanes) _mm256_storeu_ps(chunk.sums + m * dim + d, _mm256_setzero_ps());
  }
  // Every query sees the positions from `common_begin` up to, not including, `common_end`.
  const int64_t common_end = chunk.first_query + 1;
  const int64_t newest = chunk.first_query + chunk.query_len - 1;
  const int64_t common_begin = chunk.window > 0 ? newest - chunk.window + 1 : chunk.begin;
  for (int64_t begin = chunk.begin; begin < chunk.end;) {
    // A range ends where the ring does, and where visibility to all begins or ends.
    int64_t end = min_of(chunk.end, begin + chunk.capacity - begin % chunk.capacity);
    if (begin < common_begin) {
      end = min_of(end, common_begin);
    } else if (begin < common_end) {
      end = min_of(end, common_end);
    }
    run_range<Kv>(chunk, begin, end, begin >= common_begin && begin < common_end);
    begin = end;
  }
}

template <class Element>
void merge(const float* sums, float* maxima, const float* weights, int64_t parts, int64_t sums_stride,
           int64_t stat_stride, int64_t head_dim, float sink, typename Element::Storage* out) {
  float top = sink;
  for (int64_t p = 0; p < parts; ++p) top = maxima[p * stat_stride] > top ? maxima[p * stat_stride] : top;
  const float base = top == kMinusInfinity ? 0.0f : top;
  float total = _mm256_cvtss_f32(exp_ps(_mm256_set1_ps(sink - base)));
  for (int64_t p = 0; p < parts; ++p) {
    float* maximum = maxima + p * stat_stride;
    *maximum =
        _mm256_cvtss_f32(exp_ps(_mm256_set1_ps(*maximum - base)));  // the part's factor; 0 at -infinity
    total += weights[p * stat_stride] * *maximum;
  }
  const __m256 inverse = _mm256_set1_ps(total == 0.0f ? 0.0f : 1.0f / total);
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    __m256 sum = _mm256_setzero_ps();
    for (int64_t p = 0; p < parts; ++p) {
      const __m256 factor = _mm256_broadcast_ss(maxima + p * stat_stride);
      sum = _mm256_fmadd_ps(_mm256_loadu_ps(sums + p * sums_stride + d), factor, sum);
    }
    Element::store(out + d, _mm256_mul_ps(sum, inverse));
  }
}

}  // namespace

void attention_chunk_avx2(const AttentionChunk& chunk) {
  with_element(chunk.kv_dtype, [&](auto kv) { run_chunk<decltype(kv)>(chunk); });
}

void attention_merge_avx2(DType dtype, const float* sums, float* maxima, const float* weights, int64_t parts,
                          int64_t sums_stride, int64_t stat_stride, int64_t head_dim, float sink, void* out) {
  with_element(dtype, [=](auto element) {
    using Element = decltype(element);
    merge<Element>(sums, maxima, weights, parts, sums_stride, stat_stride, head_dim, sink,
                   static_cast<typename Element::Storage*>(out));
  });
}

}  // namespace hf_fastpath
