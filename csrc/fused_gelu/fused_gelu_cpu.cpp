// fused_gelu on the CPU: checks, allocation, threads, and the portable kernel.
#include "fused_gelu/fused_gelu_cpu.h"

#include "common/cpu_glue.h"
#include "common/cpu_math.h"

namespace hf_fastpath {

void gelu_portable(DType dtype, const void* x, void* out, int64_t count, bool tanh_approximation) {
  const Activation activation = tanh_approximation ? Activation::kGeluTanh : Activation::kGelu;
  with_storage(dtype, [=](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const T* from = static_cast<const T*>(x);
    T* to = static_cast<T*>(out);
    for (int64_t i = 0; i < count; ++i) from_float(activate(activation, to_float(from[i])), to + i);
  });
}

namespace {

Tensor fused_gelu(const Tensor& x, int64_t approximate) {
  const DType dtype = dtype_of(x, "fused_gelu");
  const bool tanh_approximation =
      choice_of(approximate, Approximation::kTanh, "fused_gelu", "approximate") == Approximation::kTanh;
  const Tensor input = hf_fastpath::contiguous(x);
  Tensor out = empty_like_with_sizes(x, sizes_of(x));
  const int64_t count = input.numel();
  const void* from = input.const_data_ptr();
  void* to = out.mutable_data_ptr();
  const auto kernel = use_avx2() ? gelu_avx2 : gelu_portable;
  const int64_t parts = part_count(2 * count * element_size(dtype), kBytesPerPart);
  for_each_part(parts, [&](int64_t part) {
    const int64_t begin = part_begin(count, parts, part, 64), end = part_begin(count, parts, part + 1, 64);
    kernel(dtype, at(from, begin, dtype), at(to, begin, dtype), end - begin, tanh_approximation);
  });
  return out;
}

HF_FASTPATH_KERNEL(CPU, "fused_gelu", fused_gelu)

}  // namespace
}  // namespace hf_fastpath
