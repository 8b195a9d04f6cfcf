// torch.ops.hf_fastpath.packed_gemm on a GPU: see hf_fastpath/ops/packed_gemm.py for the contract.
#include <algorithm>
#include <array>

#include "common/cuda_glue.h"
#include "packed_gemm/packed_gemm.h"
#include "weights/packed_weight_glue.h"

namespace hf_fastpath {
namespace {

constexpr const char* kOp = "packed_gemm";
// A weight is dequantized for PyTorch's product so many bytes at a time.
constexpr int64_t kDequantizedBytes = 64 << 20;

// Rows of x as the kernel's copies want them: whole 16 bytes, aligned.
Tensor whole_rows(const Tensor& x, PackedGemmParams& p, cudaStream_t stream) {
  constexpr int64_t kWhole = 8;  // of elements of 16 bits
  p.x_stride = (p.k + kWhole - 1) / kWhole * kWhole;
  if (p.x_stride == p.k) {
    const Tensor same = aligned(x);
    p.x = same.data_ptr();
    return same;
  }
  const Tensor wide = empty_like_with_sizes(x, {p.rows, p.x_stride});
  p.x = wide.data_ptr();
  HF_FASTPATH_CUDA_CHECK(cudaMemcpy2DAsync(wide.data_ptr(), p.x_stride * 2, x.data_ptr(), p.k * 2, p.k * 2,
                                           p.rows, cudaMemcpyDeviceToDevice, stream));
  return wide;
}

// out = x * weight^T: [rows, k] and [features, k]; `out`, [rows, features], may be columns of a larger one.
void multiply_into(Tensor out, const Tensor& x, const Tensor& weight) {
  using torch::stable::detail::from;
  std::array<StableIValue, 3> stack{from(x), from(torch::stable::transpose(weight, 0, 1)), from(out)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::mm", "out", stack.data(), TORCH_ABI_VERSION));
  torch::stable::detail::to<Tensor>(stack[0]);
}

// A product that makes its own output would be cast by autocast; as mm's, this overload's is not.
Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  using torch::stable::detail::from;
  const Tensor out = empty_like_with_sizes(x, {x.size(0), weight.size(0)});
  std::array<StableIValue, 4> stack{from(x), from(weight), from(bias), from(out)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linear", "out", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// Computes PyTorch's product with the dequantized weight. x: [rows, k].
Tensor with_dequantized(const Tensor& x, const PackedGemmParams& p, const std::optional<Tensor>& bias,
                        cudaStream_t stream) {
  const int64_t features = p.matrix.rows;
  const int64_t row_bytes = p.k * static_cast<int64_t>(x.element_size());
  constexpr int64_t kTogether = 256;  // features: tiles of products are whole
  const int64_t piece = std::max<int64_t>(kDequantizedBytes / row_bytes / kTogether * kTogether, kTogether);
  if (bias || features <= piece || features % 8) {  // products that do not add a bias would round twice
    const Tensor weight = empty_like_with_sizes(x, {features, p.k});
    launch_packed_dequantize(p.matrix, p.quants, p.k, 0, features, p.dtype, weight.data_ptr(), stream);
    return linear(x, weight, bias);
  }
  Tensor out = empty_like_with_sizes(x, {p.rows, features});
  const int64_t pieces = (features + piece - 1) / piece;
  const int64_t share = (features + pieces * kTogether - 1) / (pieces * kTogether) * kTogether;
  for (int64_t begin = 0; begin < features; begin += share) {
    const int64_t count = std::min(share, features - begin);
    const Tensor weight = empty_like_with_sizes(x, {count, p.k});
    launch_packed_dequantize(p.matrix, p.quants, p.k, begin, begin + count, p.dtype, weight.data_ptr(),
                             stream);
    multiply_into(torch::stable::narrow(out, 1, begin, count), x, weight);
  }
  return out;
}

}  // namespace

Tensor packed_gemm_cuda(const Tensor& x, const Tensor& quants, const Tensor& scales,
                        const std::optional<Tensor>& zeros, double multiplier, int64_t format,
                        const std::optional<Tensor>& bias) {
  STD_TORCH_CHECK(x.dim() >= 1 && x.size(x.dim() - 1) > 0,
                  "hf_fastpath::packed_gemm: x has to be [..., in_features] with at least one feature");
  const DeviceGuard guard(x);
  const cudaStream_t stream = current_stream(guard.device());
  const Tensor input = hf_fastpath::contiguous(x);
  const Tensor weight = aligned(quants), factors = aligned(scales);
  std::optional<Tensor> points, shift;
  if (zeros) points = aligned(*zeros);
  PackedGemmParams p{};
  p.k = x.size(x.dim() - 1);
  p.rows = x.numel() / p.k;
  p.dtype = dtype_of(x, kOp);
  p.quants = weight.data_ptr();
  const PackedShape shape = check_packed(p.k, weight, factors, points, format, kOp);
  STD_TORCH_CHECK(shape.rows < int64_t{1} << 31 && p.rows < int64_t{1} << 31,
                  "hf_fastpath::packed_gemm: more than 2^31 features or rows");
  p.matrix.format = shape.format;
  p.matrix.rows = shape.rows;
  p.matrix.groups = static_cast<int>(shape.groups * scale_bytes(shape.format) / 2);
  p.matrix.blocks = static_cast<int>(shape.blocks);
  p.matrix.scales = static_cast<const uint16_t*>(factors.data_ptr());
  p.matrix.zeros = static_cast<const uint8_t*>(data_or_null(points));
  p.matrix.multiplier = static_cast<float>(multiplier);
  if (bias) {
    STD_TORCH_CHECK(bias->numel() == shape.rows && bias->dim() == 1 && dtype_of(*bias, kOp) == p.dtype,
                    "hf_fastpath::packed_gemm: bias does not match the weight and x's dtype");
    shift = hf_fastpath::contiguous(*bias);
    p.bias = shift->data_ptr();
  }
  const std::vector<int64_t> sizes = sizes_with_last(x, shape.rows);
  if (p.rows == 0 || shape.rows == 0) return empty_like_with_sizes(input, sizes);
  if (!fits_packed_gemm(p)) {
    const Tensor rows = torch::stable::view(input, {p.rows, p.k});
    return torch::stable::view(with_dequantized(rows, p, shift, stream), sizes);
  }
  const Tensor rows = whole_rows(input, p, stream);
  Tensor out = empty_like_with_sizes(input, sizes);
  p.out = out.data_ptr();
  const PackedGemmPlan plan = plan_packed_gemm(p);
  const Tensor workspace = empty_like_with_sizes(input, {(plan.partial_bytes + plan.flag_bytes) / 2});
  launch_packed_gemm(p, plan, workspace.data_ptr(), stream);
  return out;
}

HF_FASTPATH_KERNEL(CUDA, "packed_gemm", packed_gemm_cuda)

}  // namespace hf_fastpath
