// Torch-free launch of bytes_sum on a GPU.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace hf_fastpath {

constexpr int kMostSpans = 160;  // of one launch: a kernel's arguments have 4 KiB

// Bytes that follow each other, in tiles, which blocks take in turn.
struct SumSpans {
  const void* data[kMostSpans];
  int64_t bytes[kMostSpans];
  int32_t first_tile[kMostSpans + 1];  // of each, and behind the last
  int64_t place;                       // of the first word of all
  int count;
};

// *sum += the sum over the words of all spans, each of which begins at a word of its own.
void launch_bytes_sum(SumSpans& spans, uint64_t* sum, cudaStream_t stream);

}  // namespace hf_fastpath
