// What: q, k, v = split(qkv + bias); norm (if asked for) and rotate q and k (half-split pairs, or neighbors);
//   write k and v to their slots of the cache; return q. All is float32, with one rounding per value; if the
//   cache has scales, a head of a token is quantized.
// Work split: one thread for the few tokens of a decode step, else a contiguous range of tokens a thread.
// Traffic: qkv once, q and the new k and v once; some kilobytes a token.
// Roofline: latency; the call costs more than its bytes.
#include <cmath>

#include "common/kv_quants_avx2.h"
#include "rope_append/rope_append_cpu.h"

namespace hf_fastpath {
namespace {

template <class Element>
HF_INLINE __m256 load_some(const typename Element::Storage* from, int64_t count) {
  return count == kLanes ? Element::load(from) : Element::load(from, count);
}

template <class Element>
HF_INLINE void store_some(typename Element::Storage* to, __m256 value, int64_t count) {
  if (count == kLanes) return Element::store(to, value);
  Element::store(to, value, count);
}

// A head of qkv + bias, or of its norm: (offset + weight) * scale times that.
template <class Element>
struct Head {
  using Storage = typename Element::Storage;
  const Storage *x, *bias, *weight;
  float scale, offset;

  __m256 biased(int64_t i, int64_t count) const {
    const __m256 value = load_some<Element>(x + i, count);
    return bias != nullptr ? _mm256_add_ps(value, load_some<Element>(bias + i, count)) : value;
  }
  __m256 load(int64_t i, int64_t count) const {
    const __m256 value = biased(i, count);
    if (weight == nullptr) return value;
    const __m256 factor = _mm256_add_ps(load_some<Element>(weight + i, count), _mm256_set1_ps(offset));
    return _mm256_mul_ps(_mm256_mul_ps(value, _mm256_set1_ps(scale)), factor);
  }
  // Makes the norm's scale that of the first `elements`.
  void measure(int64_t elements, float eps) {
    __m256 squares = _mm256_setzero_ps();
    for (int64_t i = 0; i < elements; i += kLanes) {
      const __m256 value = biased(i, min_of(kLanes, elements - i));
      squares = _mm256_fmadd_ps(value, value, squares);
    }
    scale = 1.0f / std::sqrt(horizontal_sum(squares) / static_cast<float>(elements) + eps);
  }
  void advance(int64_t dim, int64_t stride, bool norms_all_heads) {
    x += stride;
    if (bias != nullptr) bias += dim;
    if (weight != nullptr && norms_all_heads) weight += dim;
  }
};

// out = rotate(head) of the first rotary_dim elements, elements 2i and 2i + 1 together.
template <class Element, class Out>
void turn_neighbors(const Head<Element>& head, const typename Element::Storage* cos,
                    const typename Element::Storage* sin, int64_t rotary_dim, typename Out::Storage* out) {
  constexpr int kSwapNeighbors = 0b10110001;
  for (int64_t i = 0; i < rotary_dim; i += kLanes) {
    const int64_t n = min_of(kLanes, rotary_dim - i);
    const __m256 both = head.load(i, n), other = _mm256_permute_ps(both, kSwapNeighbors);
    const __m256 crossed = _mm256_mul_ps(other, load_some<Element>(sin + i, n));
    store_some<Out>(out + i, _mm256_fmaddsub_ps(both, load_some<Element>(cos + i, n), crossed), n);
  }
}

// out = rotate(head); the elements from rotary_dim on do not turn.
template <class Element, class Out>
void turn_head(const Head<Element>& head, const typename Element::Storage* cos,
               const typename Element::Storage* sin, int64_t rotary_dim, bool neighbors, int64_t head_dim,
               typename Out::Storage* out) {
  if (neighbors) turn_neighbors<Element, Out>(head, cos, sin, rotary_dim, out);
  const int64_t half = neighbors ? 0 : rotary_dim / 2;
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t n = min_of(kLanes, half - i), j = i + half;
    const __m256 first = head.load(i, n), second = head.load(j, n);
    const __m256 cos_first = load_some<Element>(cos + i, n), cos_second = load_some<Element>(cos + j, n);
    const __m256 sin_first = load_some<Element>(sin + i, n), sin_second = load_some<Element>(sin + j, n);
    store_some<Out>(out + i, _mm256_fmsub_ps(first, cos_first, _mm256_mul_ps(second, sin_first)), n);
    store_some<Out>(out + j, _mm256_fmadd_ps(second, cos_second, _mm256_mul_ps(first, sin_second)), n);
  }
  for (int64_t i = rotary_dim; i < head_dim; i += kLanes) {
    const int64_t n = min_of(kLanes, head_dim - i);
    store_some<Out>(out + i, head.load(i, n), n);
  }
}

// Does as turn_head does, to position `place` of a cache.
template <class Element, class Kv>
HF_INLINE void append_head(const Head<Element>& head, const typename Element::Storage* cos,
                           const typename Element::Storage* sin, int64_t rotary_dim, bool neighbors,
                           int64_t head_dim, void* cache, uint16_t* scales, int64_t place) {
  auto* out = static_cast<typename Kv::Storage*>(cache) + place * head_dim;
  if constexpr (kIsQuantized<Kv>) {
    alignas(32) float values[kMaxQuantizedHeadDim];
    if (head_dim % kLanes != 0) _mm256_store_ps(values + head_dim / kLanes * kLanes, _mm256_setzero_ps());
    turn_head<Element, F32>(head, cos, sin, rotary_dim, neighbors, head_dim, values);
    quantize_head_avx2<Kv>(values, head_dim, out, scales + place);
  } else {
    turn_head<Element, Kv>(head, cos, sin, rotary_dim, neighbors, head_dim, out);
  }
}

// Calls `visit(index)` for `count` heads of a token, whose norm's scale is then known; their bias is next.
template <class Element, class Visit>
HF_INLINE void each_head(const RopeAppendArgs& args, Head<Element>& head, const HeadRows& rows, int64_t token,
                         int64_t count, const void* weight, Visit visit) {
  using Storage = typename Element::Storage;
  const int64_t dim = args.head_dim;
  head.x = static_cast<const Storage*>(rows.first) + token * rows.token_stride;
  head.weight = static_cast<const Storage*>(weight);
  const bool each = weight != nullptr && !args.norms_all_heads;
  if (weight != nullptr && !each) head.measure(count * dim, args.norm_eps);
  for (int64_t h = 0; h < count; ++h, head.advance(dim, rows.head_stride, args.norms_all_heads)) {
    if (each) head.measure(dim, args.norm_eps);
    visit(h);
  }
}

template <class Element, class Kv>
void append_tokens(const RopeAppendArgs& args, int64_t begin, int64_t end) {
  using Storage = typename Element::Storage;
  const int64_t dim = args.head_dim;
  for (int64_t t = begin; t < end; ++t) {
    const int64_t row = t / args.query_len, token = t % args.query_len;
    const int64_t angle = row * args.angle_stride + token * args.rotary_dim;
    const auto* cos = static_cast<const Storage*>(args.cos) + angle;
    const auto* sin = static_cast<const Storage*>(args.sin) + angle;
    Head<Element> head{nullptr, static_cast<const Storage*>(args.bias), nullptr, 1.0f, args.norm_offset};
    auto* q_out = static_cast<Storage*>(args.q_out) + t * args.num_heads * dim;
    each_head(args, head, args.q, t, args.num_heads, args.q_norm, [&](int64_t h) {
      turn_head<Element, Element>(head, cos, sin, args.rotary_dim, args.neighbors, dim, q_out + h * dim);
    });
    const TokenPlace to = place_of(args, row, token);
    each_head(args, head, args.k, t, args.num_kv_heads, args.k_norm, [&](int64_t h) {
      append_head<Element, Kv>(head, cos, sin, args.rotary_dim, args.neighbors, dim, args.k_cache,
                               args.k_scales, to.first + h * to.apart);
    });
    each_head(args, head, args.v, t, args.num_kv_heads, nullptr, [&](int64_t h) {
      append_head<Element, Kv>(head, cos, sin, 0, args.neighbors, dim, args.v_cache, args.v_scales,
                               to.first + h * to.apart);
    });
  }
}

}  // namespace

void rope_append_avx2(const RopeAppendArgs& args, int64_t begin, int64_t end) {
  with_element(args.dtype, [&](auto element) {
    with_kv_element(args.kv_type,
                    [&](auto kv) { append_tokens<decltype(element), decltype(kv)>(args, begin, end); });
  });
}

}  // namespace hf_fastpath
