// What: softmax(scale * q @ K.T) @ V for 1 to 16 new tokens of one KV head over a chunk of its cache, and
//   the merge of chunks. Softmax, scores and accumulators are float32. decode_attention_block.h has the
//   chunk, for vectors of 8 values here.
// Work split: the glue cuts every (batch row, KV head) into chunks of positions and gives a thread a
//   contiguous range of chunks. A chunk runs in blocks of 8 to 64 positions: scores of all query heads of
//   the group, online softmax over the block, product with V. A block takes its positions from four places
//   of the chunk, so that K and V are read as eight streams, which keeps more of the hardware prefetchers
//   busy than two. While K is used the block's V is prefetched, while V is used the next block's K.
// Traffic: K and V once, 2 * positions * head_dim * element size a KV head.
// Roofline: read bandwidth for up to four query rows a KV head, arithmetic for more. Two threads, Xeon with
//   AMX, 2026-11, chunks of float16 out of memory that no cache holds, beside R = 29 to 31 GB/s: 12 heads of
//   64 over 1000 positions and 32 of 128 over 2048, without groups, 31 GB/s; groups of 2 (64) 27.6; groups
//   of 4 (128) 27.3; groups of 8 (64) over 8000 positions 17.8, which is 142 GFLOP/s where a loop of FMAs in
//   registers makes 217. For 8 queries and heads of 64 a position is 64 FMAs for scores and 64 for V, 24 and
//   16 conversions and an exp; its scores take 12.3 ns, softmax 2.7 and V 11.7, where 64 FMAs take 8.9 and
//   ports 0 and 1, which do FMAs and conversions, 12.2 and 11.1. Tried for such groups: K and V converted
//   once into float32, in front (30 % slower) or by the first tile (10 to 20 %: it takes the first-level
//   cache).
#include "decode_attention/decode_attention_block.h"

namespace hf_fastpath {
namespace {

struct Vector8 : Floats8 {
  static constexpr int kScoreRows = 3;  // 12 accumulators, three queries and a key fill 16 registers
  static constexpr int value_vectors(int kM) { return kM == 1 ? 8 : kM == 2 ? 4 : 2; }
  HF_INLINE Type sub(Type a, Type b) { return _mm256_sub_ps(a, b); }
  HF_INLINE Type fnma(Type a, Type b, Type c) { return _mm256_fnmadd_ps(a, b, c); }
  HF_INLINE Type max(Type a, Type b) { return _mm256_max_ps(a, b); }
  // The lowest bits of every value as its exponent.
  HF_INLINE Type exponent(Type bits) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(bits), 23));
  }
  HF_INLINE float sum(Type values) { return horizontal_sum(values); }
  HF_INLINE float largest(Type values) { return horizontal_max(values); }
  // The sums of four registers, in order.
  HF_INLINE __m128 sum_of_four(Type a, Type b, Type c, Type d) {
    const __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    return _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1));
  }
};

template <class Element>
void merge(const float* accumulators, float* maxima, const float* weights, int64_t parts,
           int64_t accumulator_stride, int64_t stat_stride, int64_t head_dim, float sink,
           typename Element::Storage* out) {
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
      sum = _mm256_fmadd_ps(_mm256_loadu_ps(accumulators + p * accumulator_stride + d), factor, sum);
    }
    Element::store(out + d, _mm256_mul_ps(sum, inverse));
  }
}

}  // namespace

void attention_chunk_avx2(const AttentionChunk& chunk) {
  with_kv_element(chunk.kv_type, [&](auto kv) { run_chunk<Vector8, decltype(kv)>(chunk); });
}

void attention_merge_avx2(DType dtype, const float* accumulators, float* maxima, const float* weights,
                          int64_t parts, int64_t accumulator_stride, int64_t stat_stride, int64_t head_dim,
                          float sink, void* out) {
  with_element(dtype, [=](auto element) {
    using Element = decltype(element);
    merge<Element>(accumulators, maxima, weights, parts, accumulator_stride, stat_stride, head_dim, sink,
                   static_cast<typename Element::Storage*>(out));
  });
}

}  // namespace hf_fastpath
