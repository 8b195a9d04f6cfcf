// What: rows of a weight of 4 or 8 bits as float16 or bfloat16, in order, for products of many rows of x
//   (gemm/gemm_cpu.cpp).
// Work split: the caller's threads take ranges of rows; 32 weights of a sub-block are written at a time. int8
//   is brought to where it is converted by one shuffle of bytes; quants of four bits, and e4m3 but for its
//   sign, look their values up in tables of 16 and 128, made for every scale.
// Traffic: quants and scales once; what is written stays in a second-level cache.
// Roofline: instructions, eight to ten for 32 weights.
#include <algorithm>

#include "weights/packed_dequantize_avx512.h"

namespace hf_fastpath {
namespace {

template <PackedFormat kFormat, class Element>
void dequantize_rows(const PackedWeight& args, int64_t in_features, int64_t begin, int64_t end,
                     typename Element::Storage* to) {
  using Storage = typename Element::Storage;
  using Weight = PackedRows<kFormat>;
  const Weight weight = Weight::of(args);
  alignas(64) Storage last[kPackedBlock];
  for (int64_t n = begin; n < end; ++n) {
    float multiplier = args.multiplier;  // and the row's scale
    if constexpr (Traits<kFormat>::kScalesSums) multiplier *= Weight::scale(weight, n, 0, 0);
    Fp8Values values;
    if constexpr (kLooksUp<kFormat>) values = fp8_values<Element>(multiplier);
    for (int64_t b = 0; b < weight.blocks; ++b) {
      const int64_t count = std::min(kPackedBlock, in_features - b * kPackedBlock);
      Storage* const block = count == kPackedBlock ? to : last;
      dequantize_block<kFormat, Element, 1>(weight, n, b, multiplier, values, [&](int s, int, __m512i words) {
        _mm512_storeu_si512(block + s * kSubBlock, words);
      });
      if (block == last) std::copy_n(last, count, to);
      to += count;
    }
  }
}

}  // namespace

void dequantize_packed_avx512_bf16(const PackedWeight& weight, int64_t in_features, DType dtype,
                                   int64_t begin, int64_t end, void* to) {
  const auto dequantize = [&](auto element) {
    using Element = decltype(element);
    auto* const rows = static_cast<typename Element::Storage*>(to);
    return with_format(weight.format, [&](auto tag) {
      return dequantize_rows<decltype(tag)::value, Element>(weight, in_features, begin, end, rows);
    });
  };
  if (dtype == DType::kBFloat16) return dequantize(BF16{});
  dequantize(F16{});
}

}  // namespace hf_fastpath
