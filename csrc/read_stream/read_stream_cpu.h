// read_stream on the CPU: kernel interface, free of torch.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace hf_fastpath {

// The bits of max |data[i]| over `count` contiguous elements of `dtype`. Without the sign the bits of floats
// are ordered like their values, NaN above infinity. `many_streams`: read several places side by side.
uint32_t max_magnitude_portable(DType dtype, const void* data, int64_t count, bool many_streams);
uint32_t max_magnitude_avx2(DType dtype, const void* data, int64_t count, bool many_streams);

}  // namespace hf_fastpath
