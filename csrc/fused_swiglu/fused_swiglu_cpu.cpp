// fused_swiglu on the CPU: checks, allocation, threads, and the portable kernel.
#include "fused_swiglu/fused_swiglu_cpu.h"

#include "common/composed_ops.h"
#include "common/cpu_glue.h"
#include "common/cpu_math.h"
#include "fused_swiglu/gate_glue.h"

namespace hf_fastpath {

void gated_portable(DType dtype, Activation activation, const void* gate, const void* up, void* out,
                    int64_t count, bool one_gate) {
  with_storage(dtype, [=](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const T* g = static_cast<const T*>(gate);
    const T* u = static_cast<const T*>(up);
    T* to = static_cast<T*>(out);
    for (int64_t i = 0; i < count; ++i) {
      const float z = to_float(g[one_gate ? 0 : i]);
      const float active = activation == kSigmoid ? 1.0f / (1.0f + std::exp(-z)) : activate(activation, z);
      from_float(active * to_float(u[i]), to + i);
    }
  });
}

Tensor fused_swiglu_cpu(const Tensor& gate, const Tensor& up, int64_t activation) {
  const char* op = "fused_swiglu";
  const DType dtype = dtype_of(gate, op);
  STD_TORCH_CHECK(dtype_of(up, op) == dtype,
                  "hf_fastpath::fused_swiglu: gate and up differ in dtype: cast one");
  const bool one_gate = has_one_gate(gate, up);
  const Activation act = gate_of(activation);
  const RowView g = row_view(gate), u = row_view(up);
  Tensor out = empty_like_with_sizes(up, sizes_of(up));
  void* to = out.mutable_data_ptr();
  const auto kernel = use_avx2() ? gated_avx2 : gated_portable;
  const int64_t count = u.rows * u.columns;
  const int64_t parts = part_count(3 * count * element_size(dtype), kBytesPerPart);
  if (!one_gate && g.stride == g.columns && u.stride == u.columns) {
    for_each_part(parts, [&](int64_t part) {
      const int64_t begin = part_begin(count, parts, part, 64), end = part_begin(count, parts, part + 1, 64);
      kernel(dtype, act, at(g.data, begin, dtype), at(u.data, begin, dtype), at(to, begin, dtype),
             end - begin, false);
    });
  } else {
    for_each_part(parts, [&](int64_t part) {
      const int64_t end = part_begin(u.rows, parts, part + 1);
      for (int64_t row = part_begin(u.rows, parts, part); row < end; ++row) {
        kernel(dtype, act, at(g.data, row * g.stride, dtype), at(u.data, row * u.stride, dtype),
               at(to, row * u.columns, dtype), u.columns, one_gate);
      }
    });
  }
  return out;
}

HF_FASTPATH_KERNEL(CPU, "fused_swiglu", fused_swiglu_cpu)

}  // namespace hf_fastpath
