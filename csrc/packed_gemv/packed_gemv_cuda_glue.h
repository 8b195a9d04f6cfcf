// Torch-facing checks that packed_gemv, packed_gemv_swiglu and packed_qkv_rope_append share on a GPU.
#pragma once

#include "gemv/gemv_cuda_glue.h"
#include "packed_gemv/packed_gemv.h"
#include "weights/packed_weight_glue.h"

namespace hf_fastpath {

// A quantized matrix as an op takes it. Its tensors are kept until the launch.
class PackedTensors {
 public:
  // Sets its part of `p`, which has x's.
  PackedTensors(GemvParams& p, const Tensor& quants, const Tensor& scales, const std::optional<Tensor>& zeros,
                double multiplier, int64_t format, const char* op)
      : quants_(aligned(quants)), scales_(aligned(scales)) {
    if (zeros) zeros_ = aligned(*zeros);
    const PackedShape shape = check_packed(p.k, quants_, scales_, zeros_, format, op);
    STD_TORCH_CHECK(shape.rows < kMaxFeatures, "hf_fastpath::", op, ": more than 2^31 features");
    matrix_.format = shape.format;
    matrix_.rows = shape.rows;
    matrix_.groups = static_cast<int>(shape.groups * scale_bytes(shape.format) / 2);
    matrix_.blocks = static_cast<int>(shape.blocks);
    matrix_.scales = static_cast<const uint16_t*>(scales_.data_ptr());
    matrix_.zeros = static_cast<const uint8_t*>(data_or_null(zeros_));
    matrix_.multiplier = static_cast<float>(multiplier);
    p.segments[0].weight = quants_.data_ptr();
    p.segments[0].stride = quants_.size(1);
    p.num_segments = 1;
    p.n = static_cast<int>(shape.rows);
  }

  // Whether launch() takes `rope`.
  bool fits_append(const GemvParams& p, const RopeAppendParams& rope) const {
    return fits_packed_append(p, matrix_, rope);
  }

  // Launches the norm, where the product's kernel does not have it, and the product; `kept` has to live until
  // then.
  void launch(GemvParams& p, const RopeAppendParams* rope, const InputNorm& norm, const Tensor& x,
              std::vector<Tensor>& kept, cudaStream_t stream) const {
    norm.fuse(p);
    if (!fits_packed_gemv(p, matrix_)) norm.launch_norm(p, x, kept.emplace_back(x));
    int width = static_cast<int>(p.k);
    const bool in_chunks = has_gpu_products(matrix_.format) || reads_records(matrix_.format);
    if (in_chunks && (width % 8 || !is_aligned(p.x) || !is_aligned(p.norm.weight))) {
      width = (width + 7) / 8 * 8;
      p.x = padded(x, p.x, p.m, width, kept, stream);
      if (p.norm.weight) p.norm.weight = padded(x, p.norm.weight, 1, width, kept, stream);
    }
    void* workspace = nullptr;
    if (const int64_t bytes = packed_gemv_workspace_bytes(p, matrix_)) {
      const int64_t size = x.element_size();
      workspace = kept.emplace_back(empty_like_with_sizes(x, {(bytes + size - 1) / size})).data_ptr();
    }
    launch_packed_gemv(p, width, matrix_, rope, workspace, stream);
  }

 private:
  static bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

  // `rows` of x's length and dtype with zeros behind them.
  static const void* padded(const Tensor& x, const void* data, int rows, int width, std::vector<Tensor>& kept,
                            cudaStream_t stream) {
    const Tensor& to = kept.emplace_back(empty_like_with_sizes(x, {rows, width}));
    const size_t size = x.element_size(), bytes = x.size(x.dim() - 1) * size;
    HF_FASTPATH_CUDA_CHECK(cudaMemsetAsync(to.data_ptr(), 0, rows * width * size, stream));
    HF_FASTPATH_CUDA_CHECK(cudaMemcpy2DAsync(to.data_ptr(), width * size, data, bytes, bytes, rows,
                                             cudaMemcpyDeviceToDevice, stream));
    return to.data_ptr();
  }

  Tensor quants_, scales_;
  std::optional<Tensor> zeros_;
  PackedMatrix matrix_{};
};

}  // namespace hf_fastpath
