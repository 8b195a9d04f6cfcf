// Where rope_append reads queries, keys and values: free of torch, on every device.
#pragma once

#include <cstdint>

namespace hf_fastpath {

// Heads of tokens, of contiguous elements each; strides in elements.
struct HeadRows {
  const void* first;     // head 0 of token 0, tokens being those of [batch, query_len]
  int64_t token_stride;  // between a head of a token and that of the next
  int64_t head_stride;   // between heads of a token; head_dim if a norm is of all heads at once
};

}  // namespace hf_fastpath
