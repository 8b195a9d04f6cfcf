// A token's step of a short convolution on the CPU: kernel interface, free of torch.
#pragma once

#include "short_convolution/short_convolution_params.h"

namespace hf_fastpath {

// Channels [begin, end) of all rows, in order.
void short_convolution_portable(const ShortConvolutionParams& p, int64_t begin, int64_t end);
void short_convolution_avx2(const ShortConvolutionParams& p, int64_t begin, int64_t end);

}  // namespace hf_fastpath
