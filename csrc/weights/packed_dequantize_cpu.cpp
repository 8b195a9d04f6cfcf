// Rows of a quantized weight as floats, for any CPU. This file is free of torch.
#include "weights/packed_values_cpu.h"

namespace hf_fastpath {

void dequantize_packed_portable(const PackedWeight& weight, int64_t in_features, DType dtype, int64_t begin,
                                int64_t end, void* to) {
  with_storage(dtype, [&](auto* tag) {
    auto* out = static_cast<decltype(tag)>(to);
    for (int64_t n = begin; n < end; ++n, out += in_features) {
      for (int64_t b = 0; b < weight.blocks; ++b) {
        for (int64_t place = 0; place < kPackedBlock; ++place) {
          const int64_t k = b * kPackedBlock + weight_at(weight.format, place);
          if (k < in_features) from_float(scaled_at(weight, n, b, place) * weight.multiplier, out + k);
        }
      }
    }
  });
}

}  // namespace hf_fastpath
