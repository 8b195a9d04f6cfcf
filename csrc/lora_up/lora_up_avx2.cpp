// What: sums of a base product and of adapters' products with short rows, then activation, gate and residual.
// Work split: the glue gives every thread a range of outputs, of which kPiece at a time have their sums on
//   the stack. Eight rows of a matrix share a vector of the hidden row.
// Traffic: the matrices once (a piece's rows stay in cache for further rows of the base), base and out.
// Roofline: memory bandwidth for weights that come from memory; short rows spend as long on adding up lanes.
#include "common/avx2_math.h"
#include "common/epilogue_avx2.h"
#include "lora_up/lora_up_cpu.h"

namespace hf_fastpath {
namespace {

constexpr int64_t kPiece =
    256;                      // outputs: their sums, of both halves of a gate, stay in the first-level cache
constexpr int64_t kRows = 8;  // of a matrix, whose sums fill a vector

// The sums of eight vectors' lanes, in order.
HF_INLINE __m256 eight_sums(const __m256 (&v)[kRows]) {
  const __m256 first = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
  const __m256 second = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
  return _mm256_add_ps(_mm256_permute2f128_ps(first, second, 0x20),
                       _mm256_permute2f128_ps(first, second, 0x31));
}

// sums[0, count) += scale * (rows [0, count) of a matrix) @ hidden
template <class Element>
void add_products(const typename Element::Storage* weight, int64_t row_stride, int64_t count, int64_t rank,
                  const float* hidden, float scale, float* sums) {
  for (int64_t o = 0; o < count; o += kRows) {
    const int64_t n = min_of(kRows, count - o);
    const typename Element::Storage* rows[kRows];
    __m256 products[kRows];
    for (int64_t r = 0; r < kRows; ++r) {
      rows[r] = weight + (o + min_of(r, n - 1)) * row_stride;  // behind the last row, the last one again
      products[r] = _mm256_setzero_ps();
    }
    int64_t i = 0;
    for (; i + kLanes <= rank; i += kLanes) {
      const __m256 x = _mm256_loadu_ps(hidden + i);
#pragma GCC unroll 8
      for (int64_t r = 0; r < kRows; ++r)
        products[r] = _mm256_fmadd_ps(Element::load(rows[r] + i), x, products[r]);
    }
    if (i < rank) {
      const __m256 x = F32::load(hidden + i, rank - i);
      for (int64_t r = 0; r < kRows; ++r)
        products[r] = _mm256_fmadd_ps(Element::load(rows[r] + i, rank - i), x, products[r]);
    }
    const __m256 added = eight_sums(products), factor = _mm256_set1_ps(scale);
    if (n == kRows) {
      _mm256_storeu_ps(sums + o, _mm256_fmadd_ps(added, factor, _mm256_loadu_ps(sums + o)));
    } else {
      F32::store(sums + o, _mm256_fmadd_ps(added, factor, F32::load(sums + o, n)), n);
    }
  }
}

// sums[0, count): features [first, first + count) of base, and what all matrices add to them.
template <class Element>
void sum_features(const LoraUpParams& p, int64_t row, int64_t first, int64_t count, float* sums) {
  const auto* base = static_cast<const typename Element::Storage*>(p.base) + row * p.features + first;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) _mm256_storeu_ps(sums + i, Element::load(base + i));
  if (i < count) F32::store(sums + i, Element::load(base + i, count - i), count - i);
  const LoraMatrices& matrices = p.matrices;
  for (int m = 0; m < matrices.count; ++m) {
    const LoraMatrix& matrix = matrices.each[m];
    const int64_t of_matrix = p.first_feature[m], end = min_of(first + count, of_matrix + matrix.rows);
    const int64_t begin = first > of_matrix ? first : of_matrix;
    if (begin >= end || is_left_out(p, row, m)) continue;
    const float* hidden = p.hidden + row * matrices.ranks + matrices.first_rank[m];
    with_element(matrices.dtype, [&](auto element) {
      using Weight = decltype(element);
      const auto* weight = static_cast<const typename Weight::Storage*>(matrix.data);
      add_products<Weight>(weight + (begin - of_matrix) * matrix.row_stride, matrix.row_stride, end - begin,
                           matrix.columns, hidden, p.scale[m], sums + begin - first);
    });
  }
}

template <class Element>
void run(const LoraUpParams& p, int64_t begin, int64_t end) {
  using Storage = typename Element::Storage;
  alignas(32) float sums[2][kPiece];
  const auto* residual = static_cast<const Storage*>(p.residual);
  for (int64_t o = begin; o < end; o += kPiece) {
    const int64_t count = min_of(kPiece, end - o);
    for (int64_t row = 0; row < p.rows; ++row) {
      sum_features<Element>(p, row, o, count, sums[0]);
      if (p.gated) sum_features<Element>(p, row, p.outputs + o, count, sums[1]);
      const int64_t at = row * p.outputs + o;
      with_activation(p.activation, [&](auto tag) {
        epilogue<Element, decltype(tag)::value>(sums[0], p.gated ? sums[1] : nullptr, nullptr,
                                                residual != nullptr ? residual + at : nullptr,
                                                static_cast<Storage*>(p.out) + at, count);
      });
    }
  }
}

}  // namespace

void lora_up_avx2(const LoraUpParams& p, int64_t begin, int64_t end) {
  with_element(p.dtype, [&](auto element) { run<decltype(element)>(p, begin, end); });
}

}  // namespace hf_fastpath
