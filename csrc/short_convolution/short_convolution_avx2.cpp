// What: moves the last inputs of each channel by one, and computes activation(sum(weight * inputs) + bias),
//   with gates in front and behind, in float32, rounded once; the input's gate is rounded before.
// Work split: the glue gives every thread a range of channels, which is taken eight at a time. For width 4 a
//   vector holds two channels' inputs; other widths go channel by channel to the sum, and by vectors from
//   there.
// Traffic: channels * (3 * width + 2) * element size.
// Roofline: arithmetic (conversions, and the activation's exp); microseconds beside a layer's products.
#include "common/avx2_math.h"
#include "short_convolution/short_convolution_cpu.h"

namespace hf_fastpath {
namespace {

// The new inputs `x` of eight channels pushed into their windows of four, and the sums of their products.
template <class Element>
HF_INLINE __m256 push_four(typename Element::Storage* state, const typename Element::Storage* weight,
                           __m256 x) {
  const __m256i moved = _mm256_setr_epi32(1, 2, 3, 3, 5, 6, 7, 7);
  __m256 products[4];
  for (int pair = 0; pair < 4; ++pair) {
    const __m256 newest =
        _mm256_permutevar8x32_ps(x, _mm256_setr_epi32(0, 0, 0, 2 * pair, 0, 0, 0, 2 * pair + 1));
    const __m256 old = _mm256_permutevar8x32_ps(Element::load(state + pair * kLanes), moved);
    const __m256 inputs = _mm256_blend_ps(old, newest, 0x88);
    Element::store(state + pair * kLanes, inputs);
    products[pair] = _mm256_mul_ps(inputs, Element::load(weight + pair * kLanes));
  }
  // Even channels end up in the lower half of the register, odd ones in the upper.
  const __m256 sums =
      _mm256_hadd_ps(_mm256_hadd_ps(products[0], products[1]), _mm256_hadd_ps(products[2], products[3]));
  return _mm256_permutevar8x32_ps(sums, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

// The same for `count` channels, up to eight, of any width.
template <class Element>
HF_INLINE __m256 push(typename Element::Storage* state, const typename Element::Storage* weight, __m256 x,
                      int64_t width, int64_t count) {
  using Storage = typename Element::Storage;
  alignas(32) Storage newest[kLanes];
  alignas(32) float sums[kLanes] = {};
  Element::store(newest, x);
  for (int64_t c = 0; c < count; ++c, state += width, weight += width) {
    for (int64_t j = 0; j + 1 < width; ++j) state[j] = state[j + 1];
    state[width - 1] = newest[c];
    __m256 products = _mm256_setzero_ps();
    for (int64_t j = 0; j < width; j += kLanes) {
      const int64_t n = min_of(kLanes, width - j);
      products = _mm256_fmadd_ps(Element::load(state + j, n), Element::load(weight + j, n), products);
    }
    sums[c] = horizontal_sum(products);
  }
  return _mm256_load_ps(sums);
}

template <class Element, Activation kActivation>
void push_channels(const ShortConvolutionParams& p, int64_t begin, int64_t end) {
  using Storage = typename Element::Storage;
  const auto of = [](const void* base, int64_t offset) { return static_cast<const Storage*>(base) + offset; };
  for (int64_t i = begin; i < end;) {
    const int64_t channel = i % p.channels, first_row = i / p.channels * p.tokens;
    const int64_t count = min_of(kLanes, min_of(end - i, p.channels - channel));
    Storage* state = static_cast<Storage*>(p.state) + i * p.width;
    const Storage* weight = of(p.weight, channel * p.width);
    for (int64_t row = first_row; row < first_row + p.tokens; ++row) {
      __m256 x = Element::load(of(p.x, row * p.x_stride + channel), count);
      if (p.input_gate != nullptr)
        x = _mm256_mul_ps(x, Element::load(of(p.input_gate, row * p.input_gate_stride + channel), count));
      __m256 sum;
      if (p.width == 4 && count == kLanes) {
        alignas(32) Storage rounded[kLanes];
        Element::store(rounded, x);
        sum = push_four<Element>(state, weight, Element::load(rounded));
      } else {
        sum = push<Element>(state, weight, x, p.width, count);
      }
      if (p.bias != nullptr) sum = _mm256_add_ps(sum, Element::load(of(p.bias, channel), count));
      sum = activate_ps<kActivation>(sum);
      if (p.output_gate != nullptr)
        sum =
            _mm256_mul_ps(sum, Element::load(of(p.output_gate, row * p.output_gate_stride + channel), count));
      Element::store(static_cast<Storage*>(p.out) + row * p.channels + channel, sum, count);
    }
    i += count;
  }
}

}  // namespace

void short_convolution_avx2(const ShortConvolutionParams& p, int64_t begin, int64_t end) {
  with_element(p.dtype, [&](auto element) {
    with_activation(p.activation,
                    [&](auto tag) { push_channels<decltype(element), decltype(tag)::value>(p, begin, end); });
  });
}

}  // namespace hf_fastpath
