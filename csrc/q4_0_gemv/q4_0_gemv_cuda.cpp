// torch.ops.hf_fastpath.q4_0_gemv on a GPU: see hf_fastpath/ops/q4_0_gemv.py for the contract.
#include "common/cuda_glue.h"
#include "q4_0_gemv/q4_0_gemv.h"

namespace hf_fastpath {
namespace {

Tensor q4_0_gemv(const Tensor& raw, const Tensor& raw_quants, const std::optional<Tensor>& raw_scales) {
  const DType dtype = dtype_of(raw, "q4_0_gemv");
  const int64_t columns = raw.dim() > 0 ? raw.size(raw.dim() - 1) : 0;
  STD_TORCH_CHECK(columns > 0 && columns % 32 == 0 && raw.numel() == columns,
                  "hf_fastpath::q4_0_gemv: x is not one row of a multiple of 32 features");
  const int64_t groups = columns / 32, width = groups * (raw_scales.has_value() ? 16 : 18);
  STD_TORCH_CHECK(raw_quants.dim() == 2 && raw_quants.size(1) == width &&
                      raw_quants.scalar_type() == ScalarType::Byte &&
                      raw_quants.get_device_index() == raw.get_device_index(),
                  "hf_fastpath::q4_0_gemv: quants are not uint8 [out_features, ", width, "] on x's device");
  STD_TORCH_CHECK(!raw_scales.has_value() ||
                      (raw_scales->dim() == 2 && raw_scales->size(0) == raw_quants.size(0) &&
                       raw_scales->size(1) == groups && raw_scales->scalar_type() == ScalarType::Half &&
                       raw_scales->get_device_index() == raw.get_device_index()),
                  "hf_fastpath::q4_0_gemv: scales are not float16 [out_features, ", groups,
                  "] on x's device");
  const DeviceGuard guard(raw);
  const Tensor x = hf_fastpath::contiguous(raw), quants = hf_fastpath::contiguous(raw_quants);
  std::optional<Tensor> scales;
  if (raw_scales.has_value()) scales = hf_fastpath::contiguous(*raw_scales);
  Tensor out = empty_like_with_sizes(x, sizes_with_last(x, quants.size(0)));
  if (quants.size(0) > 0) {
    launch_q4_0_gemv(x.data_ptr(), static_cast<const uint8_t*>(quants.data_ptr()), data_or_null(scales),
                     out.mutable_data_ptr(), quants.size(0), groups, dtype, current_stream(guard.device()));
  }
  return out;
}

}  // namespace

HF_FASTPATH_KERNEL(CUDA, "q4_0_gemv", q4_0_gemv)

}  // namespace hf_fastpath
