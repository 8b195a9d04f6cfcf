// What: out = activation(x @ W.T + bias) + residual, or activation(x @ W.T) * (x @ U.T), for 1 to 16 rows of
//   x, with the weight as nn.Linear stores it ([out, in]) or as Conv1D does ([in, out]). Float32 sums,
//   rounded once.
// Work split: Linear: a thread owns ranges of outputs. It walks a range as four or six streams, each an
//   unbroken piece of memory; several streams keep more of the hardware prefetchers and line buffers busy
//   than one does, and long ones are what those prefetchers follow. gemv_linear.h has the product. Conv1D: a
//   thread owns a range of inputs (and, with many threads, of outputs) and walks it as eight streams, too;
//   partial sums of the ranges are added in order afterwards.
// Traffic: the weight once, out_features * in_features * element size; x, bias and outputs are small. Conv1D
//   adds two float32 passes over parts * rows * out_features.
// Roofline: read bandwidth up to four rows of x, then arithmetic. All matrices of TinyLlama one after the
//   other, two threads, R = 31.4 GB/s, Xeon with AMX, 2026-11, of R: Linear, 16-bit types, 94 % for one and
//   two rows, 87 for four, 53 for eight (133 GFLOP/s; a loop of FMAs reaches 217). Conv1D, of R, 2.8 GHz: 73
//   to 98 % in 16-bit types, 89 to 107 % in float32.
#include "gemv/gemv_linear.h"

namespace hf_fastpath {
namespace {

struct Vector8 : Floats8 {
  static constexpr int kRows = 4;  // of x: 12 sums, three vectors of weights and one of x fill the registers
};

// ---- Conv1D layout ------------------------------------------------------------------------------------

constexpr int kStreams = 8;                // weight rows read at once, each from its own piece of memory
constexpr int64_t kMostAheadBytes = 1024;  // of read_ahead_bytes()
// Float32 sums one pass keeps: half of a 48 KiB first-level cache.
constexpr int64_t kPassFloats = 6144;
// Outputs merged before bias and activation are applied to them.
constexpr int64_t kChunk = 64;

// accumulators[m][c] += sum over streams s of x[m][s] * w[s][c], for kM rows and kVectors vectors of columns.
template <class Element, int kS, int kM, int kVectors>
HF_INLINE void axpy_tile(const typename Element::Storage* const (&w)[kS], const float (*x)[kS], int64_t c,
                         float* accumulators, int64_t stride) {
  __m256 sum[kM][kVectors];
  for (int m = 0; m < kM; ++m) {
    for (int v = 0; v < kVectors; ++v) sum[m][v] = _mm256_setzero_ps();
  }
#pragma GCC unroll 8
  for (int s = 0; s < kS; ++s) {
    __m256 weight[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) weight[v] = Element::load(w[s] + c + v * kLanes);
#pragma GCC unroll 4
    for (int m = 0; m < kM; ++m) {
      const __m256 value = _mm256_broadcast_ss(&x[m][s]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[m][v] = _mm256_fmadd_ps(weight[v], value, sum[m][v]);
    }
  }
  // The streams are summed from zero first: the chain in memory is then kS times shorter, and rounds less.
  for (int m = 0; m < kM; ++m) {
    for (int v = 0; v < kVectors; ++v) {
      float* to = accumulators + m * stride + c + v * kLanes;
      _mm256_storeu_ps(to, _mm256_add_ps(_mm256_loadu_ps(to), sum[m][v]));
    }
  }
}

// The last columns, fewer than a vector; same order of sums.
template <class Element, int kS>
void axpy_tail(const typename Element::Storage* const (&w)[kS], const float (*x)[kS], int64_t rows, int64_t c,
               int64_t count, float* accumulators, int64_t stride) {
  for (int64_t m = 0; m < rows; ++m) {
    __m256 sum = _mm256_setzero_ps();
    for (int s = 0; s < kS; ++s) {
      sum = _mm256_fmadd_ps(Element::load(w[s] + c, count), _mm256_broadcast_ss(&x[m][s]), sum);
    }
    float* to = accumulators + m * stride + c;
    F32::store(to, _mm256_add_ps(F32::load(to, count), sum), count);
  }
}

// Adds rows k + s * length + j (stream s, step j) times x to accumulators[m][n], n in [n_begin, n_end).
template <class Element, int kS>
void axpy_streams(const LinearArgs& args, int64_t k, int64_t length, int64_t n_begin, int64_t n_end,
                  float* accumulators, int64_t stride) {
  using Storage = typename Element::Storage;
  constexpr int64_t kLine = kCacheLineBytes / static_cast<int64_t>(sizeof(Storage));
  const int64_t ahead = read_ahead_bytes(kMostAheadBytes) / static_cast<int64_t>(sizeof(Storage));
  const int64_t rows = args.rows;
  for (int64_t j = 0; j < length; ++j) {
    const Storage* w[kS];
    float x[kMaxRows][kS];
    for (int s = 0; s < kS; ++s) {
      const int64_t input = k + s * length + j;
      w[s] = static_cast<const Storage*>(args.weight) + input * args.weight_stride;
      for (int64_t m = 0; m < rows; ++m) x[m][s] = args.x[m * args.x_stride + input];
    }
    int64_t c = n_begin;
    for (; c + kLine <= n_end; c += kLine) {
#pragma GCC unroll 8
      for (int s = 0; s < kS; ++s) _mm_prefetch(reinterpret_cast<const char*>(w[s] + c + ahead), _MM_HINT_T0);
      if (rows == 1) {
        for (int64_t i = 0; i < kLine; i += 2 * kLanes)
          axpy_tile<Element, kS, 1, 2>(w, x, c + i, accumulators, stride);
        continue;
      }
      for (int64_t i = 0; i < kLine; i += 2 * kLanes) {
        int64_t m = 0;
        for (; m + 4 <= rows; m += 4) {
          axpy_tile<Element, kS, 4, 2>(w, x + m, c + i, accumulators + m * stride, stride);
        }
        for (; m + 2 <= rows; m += 2)
          axpy_tile<Element, kS, 2, 2>(w, x + m, c + i, accumulators + m * stride, stride);
        if (m < rows) axpy_tile<Element, kS, 1, 2>(w, x + m, c + i, accumulators + m * stride, stride);
      }
    }
    for (; c + kLanes <= n_end; c += kLanes) {
      for (int64_t m = 0; m < rows; ++m)
        axpy_tile<Element, kS, 1, 1>(w, x + m, c, accumulators + m * stride, stride);
    }
    if (c < n_end) axpy_tail<Element, kS>(w, x, rows, c, n_end - c, accumulators, stride);
  }
}

template <class Element>
void conv1d_range(const LinearArgs& args, int64_t k_begin, int64_t k_end, int64_t n_begin, int64_t n_end,
                  float* partial, int64_t stride) {
  const int64_t length = (k_end - k_begin) / kStreams;
  const int64_t rest = k_begin + length * kStreams;
  const int64_t width = kPassFloats / args.rows / kLanes * kLanes;
  for (int64_t n = n_begin; n < n_end; n += width) {
    const int64_t stop = min_of(n + width, n_end);
    for (int64_t m = 0; m < args.rows; ++m) {
      for (int64_t c = n; c < stop; ++c) partial[m * stride + c] = 0.0f;
    }
    axpy_streams<Element, kStreams>(args, k_begin, length, n, stop, partial, stride);
    axpy_streams<Element, 1>(args, rest, k_end - rest, n, stop, partial, stride);
  }
}

template <class Element>
void merge_range(const LinearArgs& args, int64_t n_begin, int64_t n_end, const float* partials, int64_t parts,
                 int64_t part_stride, int64_t partial_stride) {
  alignas(32) float y[kMaxRows * kChunk];
  for (int64_t n = n_begin; n < n_end; n += kChunk) {
    const int64_t count = min_of(kChunk, n_end - n);
    for (int64_t m = 0; m < args.rows; ++m) {
      for (int64_t i = 0; i < count; i += kLanes) {  // partial rows are padded to whole vectors
        const float* from = partials + m * partial_stride + n + i;
        __m256 sum = _mm256_loadu_ps(from);
        for (int64_t p = 1; p < parts; ++p) sum = _mm256_add_ps(sum, _mm256_loadu_ps(from + p * part_stride));
        _mm256_store_ps(y + m * kChunk + i, sum);
      }
    }
    epilogue_rows<Element>(args, y, kChunk, nullptr, n, count);
  }
}

}  // namespace

void linear_avx2(const LinearArgs& args, int64_t begin, int64_t end) {
  linear_range<Vector8>(args, begin, end);
}

void conv1d_avx2(const LinearArgs& args, int64_t k_begin, int64_t k_end, int64_t n_begin, int64_t n_end,
                 float* partial, int64_t partial_stride) {
  with_element(args.dtype, [&](auto element) {
    conv1d_range<decltype(element)>(args, k_begin, k_end, n_begin, n_end, partial, partial_stride);
  });
}

void conv1d_merge_avx2(const LinearArgs& args, int64_t n_begin, int64_t n_end, const float* partials,
                       int64_t parts, int64_t part_stride, int64_t partial_stride) {
  with_element(args.dtype, [&](auto element) {
    merge_range<decltype(element)>(args, n_begin, n_end, partials, parts, part_stride, partial_stride);
  });
}

}  // namespace hf_fastpath
