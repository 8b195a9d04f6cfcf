// Torch-facing checks that gemv, gemv_swiglu and qkv_rope_append share on a GPU.
#pragma once

#include "common/composed_ops.h"
#include "common/cuda_glue.h"
#include "gemv/gemv.h"

namespace hf_fastpath {

constexpr int64_t kMaxFeatures = int64_t(1) << 31;  // the kernels count features in 32 bits

// x as the kernels take it: contiguous, and aligned where it has more rows than all of them take.
inline Tensor gemv_input(const Tensor& x) {
  const bool is_few = x.dim() == 0 || x.numel() <= kMaxGemvRows * x.size(x.dim() - 1);
  return is_few ? hf_fastpath::contiguous(x) : aligned(x);
}

// Fills what follows from x alone.
inline GemvParams gemv_params(const Tensor& x, const char* op) {
  GemvParams p{};
  STD_TORCH_CHECK(x.dim() >= 1 && x.numel() > 0, "hf_fastpath::", op, ": x is empty");
  p.k = x.size(x.dim() - 1);
  const int64_t rows = x.numel() / p.k;
  STD_TORCH_CHECK(rows <= kMaxWgmmaRows, "hf_fastpath::", op, ": x has ", rows, " rows, expected at most ",
                  kMaxWgmmaRows, ": use nn.Linear");
  p.m = static_cast<int>(rows);
  p.x = x.data_ptr();
  p.dtype = dtype_of(x, op);
  return p;
}

// Appends a weight (and bias) after the features the segments hold so far. Returns the tensor that has to
// live until the launch: the bias made contiguous.
inline std::optional<Tensor> add_segment(GemvParams& p, const Tensor& weight,
                                         const std::optional<Tensor>& bias, const char* op) {
  STD_TORCH_CHECK(
      weight.dim() == 2 && weight.size(p.transposed ? 0 : 1) == p.k && dtype_of(weight, op) == p.dtype,
      "hf_fastpath::", op, ": a weight does not match x's last dimension (", p.k, ") and dtype");
  STD_TORCH_CHECK(weight.size(1) <= 1 || weight.stride(1) == 1, "hf_fastpath::", op,
                  ": a weight's rows are not contiguous");
  const int64_t features = weight.size(p.transposed ? 1 : 0);
  STD_TORCH_CHECK(!bias || (bias->numel() == features && dtype_of(*bias, op) == p.dtype), "hf_fastpath::", op,
                  ": a bias does not match its weight (", features, " features) and dtype");
  GemvSegment& segment = p.segments[p.num_segments++];
  segment.weight = weight.data_ptr();
  std::optional<Tensor> kept;
  if (bias) kept = hf_fastpath::contiguous(*bias);
  segment.bias = data_or_null(kept);
  STD_TORCH_CHECK(weight.stride(0) <= std::numeric_limits<int>::max(), "hf_fastpath::", op,
                  ": rows of a weight lie ", weight.stride(0), " elements apart, expected less than 2^31");
  segment.stride = static_cast<int>(weight.stride(0));
  segment.first = p.n;
  STD_TORCH_CHECK(p.k < kMaxFeatures && p.n + features < kMaxFeatures, "hf_fastpath::", op,
                  ": more than 2^31 features");
  p.n += static_cast<int>(features);
  return kept;
}

inline void set_next_weight(GemvParams& p, const std::optional<Tensor>& weight) {
  if (!weight || !weight->is_contiguous() || !weight->is_cuda()) return;
  p.next_weight = weight->data_ptr();
  p.next_bytes = weight->numel() * static_cast<int64_t>(weight->element_size());
}

// The norm in front of a product; its tensors are kept until the launch.
class InputNorm {
 public:
  InputNorm(const Tensor& x, int64_t norm, const std::optional<Tensor>& weight,
            const std::optional<Tensor>& bias, double eps, const char* op)
      : kind_(norm_of(norm, op)), eps_(eps) {
    for (auto [given, kept] : {std::pair(&weight, &weight_), std::pair(&bias, &bias_)}) {
      if (!*given) continue;
      STD_TORCH_CHECK(kind_ != NormKind::kNone && (*given)->dim() == 1 &&
                          (*given)->size(0) == x.size(x.dim() - 1) &&
                          dtype_of(**given, op) == dtype_of(x, op),
                      "hf_fastpath::", op, ": norm_weight or norm_bias does not match x and norm");
      *kept = hf_fastpath::contiguous(**given);
    }
    STD_TORCH_CHECK(!is_rms(kind_) || (weight_ && !bias_), "hf_fastpath::", op,
                    ": norm 'rms' takes norm_weight and no norm_bias");
  }

  // Leaves the norm to the product's kernel.
  void fuse(GemvParams& p) const {
    p.norm = {is_rms(kind_) ? NormKind::kRms : kind_,
              data_or_null(weight_),
              data_or_null(bias_),
              static_cast<float>(eps_),
              weight_offset(kind_),
              kind_ == NormKind::kRmsOffset ? ~0u : 0u};
  }

  // Launches norm and product (and with `rope` the append) as one kernel, if there is one for them.
  bool launch_as_one(GemvParams& p, const RopeAppendParams* rope, cudaStream_t stream) const {
    fuse(p);
    if ((rope || kind_ != NormKind::kNone) && !fits_one_kernel(p, rope)) return false;
    launch_gemv(p, rope, stream);
    return true;
  }

  // Launches the norm by itself; `normed` has to live until the product's launch.
  void launch_norm(GemvParams& p, const Tensor& x, Tensor& normed) const {
    normed = normed_cuda(x, kind_, weight_, bias_, eps_);
    p.x = normed.data_ptr();
    p.norm = {};
  }

  void launch(GemvParams& p, const Tensor& x, cudaStream_t stream) const {
    if (launch_as_one(p, nullptr, stream)) return;
    Tensor normed;
    launch_norm(p, x, normed);
    launch_gemv(p, nullptr, stream);
  }

 private:
  NormKind kind_;
  std::optional<Tensor> weight_, bias_;
  double eps_;
};

}  // namespace hf_fastpath
