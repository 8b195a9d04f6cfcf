// header
#include <utility>

#include "gemm/gemm_block.h"

namespace hf_fastpath {
namespace {

struct Vector8 {
  using Type = __m256;
  static constexpr int kWidth = 8;
  static constexpr int kRows =
      6;  // twelve sums, two vectors of the panel and a broadcast: 15 of 16 registers
  HF_INLINE Type zero() { return _mm256_setzero_ps(); }
  HF_INLINE Type load(const float* from) { return _mm256_load_ps(from); }
  HF_INLINE Type broadcast(const float* from) { return _mm256_broadcast_ss(from); }
  HF_INLINE Type add(Type a, Type b) { return _mm256_add_ps(a, b); }
  HF_INLINE Type fma(Type a, Type b, Type c) { return _mm256_fmadd_ps(a, b, c); }
  HF_INLINE void store(float* to, Type value) { _mm256_store_ps(to, value); }
};

}  // namespace

void gemm_strip_avx2(const GemmArgs& args, int64_t row_begin, int64_t row_end, int64_t begin, int64_t end,
                     float* scratch) {
  if (args.dtype == DType::kFloat16)
    return strip<Vector8, F16>(args, row_begin, row_end, begin, end, scratch);
  strip<Vector8, BF16>(args, row_begin, row_end, begin, end, scratch);
}

void finish_rows_avx2(const FinishArgs& args, int64_t begin, int64_t end) {
  with_element(args.dtype, [&](auto element) {
    using Element = decltype(element);
    using Storage = typename Element::Storage;
    const auto* residual = static_cast<const Storage*>(args.residual);
    with_activation(args.activation, [&](auto tag) {
      constexpr Activation kActivation = decltype(tag)::value;
      for (int64_t row = begin; row < end; ++row) {
        const int64_t from = row * args.sums_stride, to = row * args.stride;
        const auto* bias = static_cast<const Storage*>(args.bias);
        const auto* added = residual != nullptr ? residual + to : nullptr;
        auto* out = static_cast<Storage*>(args.out) + to;
        if (args.sums_dtype == DType::kFloat32) {
          epilogue<Element, kActivation>(static_cast<const float*>(args.sums) + from, nullptr, bias, added,
                                         out, args.columns);
        } else {
          epilogue<Element, kActivation, Element>(static_cast<const Storage*>(args.sums) + from, nullptr,
                                                  bias, added, out, args.columns);
        }
      }
    });
  });
}

}  // namespace hf_fastpath
