// What the glue of recurrent steps shares on every device: checked views by head, parameters and states.
// This header is torch-facing.
#pragma once

#include <initializer_list>
#include <vector>

#include "common/heads.h"
#include "common/torch_glue.h"

namespace hf_fastpath {

inline bool has_sizes(const Tensor& tensor, std::initializer_list<int64_t> sizes) {
  if (tensor.dim() != static_cast<int64_t>(sizes.size())) return false;
  int64_t dim = 0;
  for (const int64_t size : sizes) {
    if (tensor.size(dim++) != size) return false;
  }
  return true;
}

// The number of sequences, of which `tokens` rows each follow each other.
inline int64_t sequences_of(int64_t rows, int64_t tokens, const char* op) {
  STD_TORCH_CHECK(tokens >= 1 && rows % tokens == 0, "hf_fastpath::", op, ": got ", rows, " rows, expected ",
                  "a multiple of tokens, ", tokens, ", which is at least 1");
  return rows / tokens;
}

// Checks the arguments of one call, and keeps what had to be copied alive until the kernel has it.
class HeadsCall {
 public:
  HeadsCall(const char* op, DType dtype) : op_(op), dtype_(dtype) {}

  // A tensor of activations as [batch, heads, elements]; with two dimensions a head is one element.
  Heads heads(const Tensor& tensor, const char* name, std::initializer_list<int64_t> sizes) {
    check(tensor, name, sizes);
    STD_TORCH_CHECK(dtype_of(tensor, op_) == dtype_, "hf_fastpath::", op_, ": ", name,
                    " differs in dtype: cast it");
    kept_.push_back(tensor.dim() == 2 ? tensor : dense_rows(tensor));
    const Tensor& view = kept_.back();
    return {view.const_data_ptr(), view.stride(0), view.stride(1)};
  }
  Heads heads(const std::optional<Tensor>& tensor, const char* name, std::initializer_list<int64_t> sizes) {
    return tensor ? heads(*tensor, name, sizes) : Heads{};
  }

  // Rows of activations, [batch, elements], one for each row of the batch or one for all: head 0 of each row.
  Heads rows(const std::optional<Tensor>& tensor, const char* name, int64_t batch, int64_t elements,
             bool shared = false) {
    if (!tensor) return {};
    const bool one = shared && tensor->dim() == 2 && tensor->size(0) == 1;
    check(*tensor, name, {one ? 1 : batch, elements});
    STD_TORCH_CHECK(dtype_of(*tensor, op_) == dtype_, "hf_fastpath::", op_, ": ", name,
                    " differs in dtype: cast it");
    kept_.push_back(dense_rows(*tensor));
    return {kept_.back().const_data_ptr(), one ? 0 : kept_.back().stride(0), 0};
  }

  // A weight in float32 or the activations' type.
  Parameter parameter(const Tensor& tensor, const char* name, std::initializer_list<int64_t> sizes) {
    check(tensor, name, sizes);
    const DType dtype = dtype_of(tensor, op_);
    STD_TORCH_CHECK(dtype == dtype_ || dtype == DType::kFloat32, "hf_fastpath::", op_, ": ", name,
                    " has to be float32 or of the activations' dtype");
    kept_.push_back(hf_fastpath::contiguous(tensor));
    return {kept_.back().const_data_ptr(), dtype};
  }
  Parameter parameter(const std::optional<Tensor>& tensor, const char* name,
                      std::initializer_list<int64_t> sizes) {
    return tensor ? parameter(*tensor, name, sizes) : Parameter{};
  }

  // A state in float32, updated in place.
  float* state(const Tensor& tensor, std::initializer_list<int64_t> sizes) {
    check(tensor, "state", sizes);
    STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Float && tensor.is_contiguous(), "hf_fastpath::", op_,
                    ": state has to be contiguous float32");
    return static_cast<float*>(tensor.data_ptr());
  }

 private:
  void check(const Tensor& tensor, const char* name, std::initializer_list<int64_t> sizes) const {
    STD_TORCH_CHECK(has_sizes(tensor, sizes), "hf_fastpath::", op_, ": ", name, " has another shape than ",
                    "the other arguments imply");
  }

  const char* op_;
  DType dtype_;
  std::vector<Tensor> kept_;
};

}  // namespace hf_fastpath
