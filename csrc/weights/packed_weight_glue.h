// Torch-facing checks of quantized matrices that all devices share.
#pragma once

#include <optional>

#include "common/torch_glue.h"
#include "weights/packed_format.h"

namespace hf_fastpath {

inline bool are_scales(const Tensor& tensor, PackedScales scales) {
  switch (scales) {
    case PackedScales::kFloat16:
      return tensor.scalar_type() == ScalarType::Half;
    case PackedScales::kFloat32:
      return tensor.scalar_type() == ScalarType::Float;
    default:  // bytes of exponents, or of records
      return tensor.scalar_type() == ScalarType::Byte;
  }
}

struct PackedShape {
  PackedFormat format;
  int64_t rows, blocks, groups;
};

// Whether contiguous tensors are a quantized matrix for `k` inputs, and which.
inline PackedShape check_packed(int64_t k, const Tensor& quants, const Tensor& scales,
                                const std::optional<Tensor>& zeros, int64_t format, const char* op) {
  PackedShape shape{};
  shape.format = choice_of(format, kLastPackedFormat, op, "format");
  shape.blocks = (k + kPackedBlock - 1) / kPackedBlock;
  shape.groups = groups_of(shape.format, shape.blocks);
  const int64_t row_bytes = shape.blocks * kPackedBlock * bits_of(shape.format) / 8;
  STD_TORCH_CHECK(quants.dim() == 2 && quants.element_size() == 1 && quants.size(1) == row_bytes,
                  "hf_fastpath::", op, ": quants are no rows of ", row_bytes, " bytes");
  shape.rows = quants.size(0);
  const auto fits = [&](const Tensor& t) {
    return t.dim() == 2 && t.size(0) == shape.rows && t.size(1) == shape.groups;
  };
  STD_TORCH_CHECK(fits(scales) && are_scales(scales, traits_of(shape.format).scales), "hf_fastpath::", op,
                  ": scales have to be [out_features, ", shape.groups, "], of ",
                  8 * scale_bytes(shape.format), " bits, as the format has them");
  STD_TORCH_CHECK(zeros.has_value() == has_zeros(shape.format) &&
                      (!zeros || (fits(*zeros) && zeros->element_size() == 1)),
                  "hf_fastpath::", op, ": format ", format, " and zeros do not go together");
  return shape;
}

}  // namespace hf_fastpath
