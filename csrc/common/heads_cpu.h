// Loads of recurrent steps' inputs in the portable CPU code, in float64: what there is one of in a head or a
// channel, whose error would add to those of all its elements. Linkage is internal, as in cpu_math.h.
#pragma once

#include <cmath>
#include <type_traits>

#include "common/cpu_math.h"
#include "common/heads.h"

namespace hf_fastpath {
namespace {

template <class T>
[[maybe_unused]] inline const T* head_of(const Heads& heads, int64_t row, int64_t head) {
  return static_cast<const T*>(heads.data) + row * heads.batch_stride + head * heads.head_stride;
}

[[maybe_unused]] inline double load(const Parameter& parameter, int64_t i) {
  double value = 0.0;
  with_storage(parameter.dtype, [&](auto* tag) {
    value = to_float(static_cast<const std::remove_pointer_t<decltype(tag)>*>(parameter.data)[i]);
  });
  return value;
}

[[maybe_unused]] inline double softplus(double x) {
  return x > kSoftplusThreshold ? x : std::log1p(std::exp(x));
}

}  // namespace
}  // namespace hf_fastpath
