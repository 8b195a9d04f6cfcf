// Head dims of the attention kernels.
#pragma once

namespace hf_fastpath {

constexpr int kMinHeadDim = 32, kMaxHeadDim = 256;  // in steps of 8

}  // namespace hf_fastpath
