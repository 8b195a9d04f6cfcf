// The arguments that ops over the GPUs of one host share, taken from tensors and checked.
#pragma once

#include "common/peers.h"
#include "common/torch_glue.h"

namespace hf_fastpath {

inline PeerParams peers_of(const Tensor& x, const std::vector<Tensor>& buffers, const Tensor& status,
                           int64_t rank, int64_t slot, const char* op) {
  const int64_t size = static_cast<int64_t>(buffers.size());
  STD_TORCH_CHECK(size >= 1 && size <= kMaxRanks && rank >= 0 && rank < size, "hf_fastpath::", op,
                  ": rank is ", rank, " of ", size, ", expected one of at most ", kMaxRanks);
  STD_TORCH_CHECK(
      x.is_contiguous() && x.numel() % 8 == 0 && reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0,
      "hf_fastpath::", op, ": x has to be contiguous and aligned, with a multiple of 8 elements");
  PeerParams peers = {};
  for (int64_t r = 0; r < size; ++r) {
    const Tensor& buffer = buffers[r];
    STD_TORCH_CHECK(buffer.dim() == 3 && buffer.is_contiguous() && buffer.is_cuda() &&
                        buffer.scalar_type() == x.scalar_type() && buffer.size(0) == buffers[0].size(0) &&
                        buffer.size(1) == size && buffer.size(2) == buffers[0].size(2) &&
                        buffer.size(2) % 8 == 0 && reinterpret_cast<uintptr_t>(buffer.data_ptr()) % 16 == 0,
                    "hf_fastpath::", op, ": buffers[", r,
                    "] has to be a contiguous [slots, size, elements] of x's dtype on a GPU, as all are");
    peers.buffers[r] = buffer.data_ptr();
  }
  STD_TORCH_CHECK(slot >= 0 && slot < buffers[0].size(0) && x.numel() <= buffers[0].size(2),
                  "hf_fastpath::", op, ": slot ", slot, " of ", buffers[0].size(0), ", ", x.numel(),
                  " elements, room for ", buffers[0].size(2));
  STD_TORCH_CHECK(status.scalar_type() == ScalarType::Int && status.numel() == 1, "hf_fastpath::", op,
                  ": status has to be one int32");
  peers.status = static_cast<int32_t*>(status.data_ptr());
  peers.words = buffers[0].size(2) * static_cast<int64_t>(element_size(dtype_of(x, op))) / 16;
  peers.size = static_cast<int>(size), peers.rank = static_cast<int>(rank),
  peers.slot = static_cast<int>(slot);
  return peers;
}

}  // namespace hf_fastpath
