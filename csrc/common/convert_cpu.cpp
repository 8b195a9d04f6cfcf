// Portable conversion of activations to float32.
#include "common/convert_cpu.h"

#include <type_traits>

#include "common/cpu_math.h"

namespace hf_fastpath {

void convert_to_float_portable(DType dtype, const void* x, float* out, int64_t count) {
  with_storage(dtype, [=](auto* tag) {
    const auto* from = static_cast<const std::remove_pointer_t<decltype(tag)>*>(x);
    for (int64_t i = 0; i < count; ++i) out[i] = to_float(from[i]);
  });
}

}  // namespace hf_fastpath
