// The tensors of bytes_sum, checked. This header is torch-facing.
#pragma once

#include <vector>

#include "bytes_sum/bytes_sum_words.h"
#include "common/torch_glue.h"

namespace hf_fastpath {

// Bytes that follow each other, and the place of their first word among those of all tensors.
struct SummedBytes {
  const void* data;
  int64_t bytes;
  int64_t place;
};

inline std::vector<SummedBytes> summed_bytes(const std::vector<Tensor>& tensors) {
  STD_TORCH_CHECK(!tensors.empty(), "hf_fastpath::bytes_sum: tensors is empty");
  std::vector<SummedBytes> found;
  found.reserve(tensors.size());
  int64_t place = 0;
  for (const Tensor& tensor : tensors) {
    STD_TORCH_CHECK(tensor.is_contiguous() && tensor.device() == tensors[0].device(),
                    "hf_fastpath::bytes_sum: tensors have to be contiguous, and on one device");
    const int64_t bytes = tensor.numel() * static_cast<int64_t>(tensor.element_size());
    if (bytes > 0) found.push_back({tensor.const_data_ptr(), bytes, place});
    place += words_of(bytes);
  }
  return found;
}

inline Tensor empty_sum(const Tensor& like) {
  return torch::stable::empty({1}, ScalarType::Long, std::nullopt, like.device());
}

}  // namespace hf_fastpath
