// torch.ops.hf_fastpath.read_stream on a GPU: see hf_fastpath/ops/read_stream.py for the contract.
#include "common/cuda_glue.h"
#include "read_stream/read_stream.h"

namespace hf_fastpath {
namespace {

Tensor read_stream(const Tensor& buffer, int64_t variant) {
  const DType dtype = dtype_of(buffer, "read_stream");
  STD_TORCH_CHECK(buffer.is_contiguous() && buffer.numel() > 0,
                  "hf_fastpath::read_stream: buffer is not contiguous or empty");
  STD_TORCH_CHECK(variant >= 0 && variant <= 2, "hf_fastpath::read_stream: variant is ", variant,
                  ", expected 0 to 2");
  const DeviceGuard guard(buffer);
  Tensor out = torch::stable::empty({1}, ScalarType::Float, std::nullopt, buffer.device());
  launch_read_stream(buffer.const_data_ptr(), buffer.numel(), dtype, static_cast<ReadVariant>(variant),
                     static_cast<float*>(out.mutable_data_ptr()), current_stream(guard.device()));
  return out;
}

}  // namespace

HF_FASTPATH_KERNEL(CUDA, "read_stream", read_stream)

}  // namespace hf_fastpath
