// torch.ops.hf_fastpath.fused_swiglu on a GPU: see hf_fastpath/ops/fused_swiglu.py for the contract.
#include "common/cuda_glue.h"
#include "fused_swiglu/fused_swiglu.h"

namespace hf_fastpath {
namespace {

// Whether all dimensions but the last collapse into rows one stride apart, with contiguous elements in a row.
bool has_uniform_rows(const Tensor& tensor) {
  const int64_t last = tensor.dim() - 1;
  if (last < 1 || tensor.stride(last) != 1) return false;
  for (int64_t d = 0; d + 1 < last; ++d) {
    if (tensor.stride(d) != tensor.stride(d + 1) * tensor.size(d + 1)) return false;
  }
  return true;
}

Tensor fused_swiglu(const Tensor& gate, const Tensor& up, int64_t activation) {
  constexpr const char* kOp = "fused_swiglu";
  const Activation act = activation_of(activation, kOp);
  STD_TORCH_CHECK(act != Activation::kNone && act != Activation::kRelu,
                  "hf_fastpath::fused_swiglu: activation is '", activation,
                  "', expected silu, gelu_tanh or gelu");
  STD_TORCH_CHECK(sizes_of(gate) == sizes_of(up) && dtype_of(gate, kOp) == dtype_of(up, kOp),
                  "hf_fastpath::fused_swiglu: gate and up differ in shape or dtype");
  const DeviceGuard guard(gate);
  const bool strided = has_uniform_rows(gate) && has_uniform_rows(up);
  const Tensor g = strided ? gate : hf_fastpath::contiguous(gate),
               u = strided ? up : hf_fastpath::contiguous(up);
  Tensor out = empty_like_with_sizes(g, sizes_of(g));
  const int64_t count = g.numel();
  const int64_t columns = strided ? g.size(g.dim() - 1) : count;
  const int64_t gate_stride = strided ? g.stride(g.dim() - 2) : columns;
  const int64_t up_stride = strided ? u.stride(u.dim() - 2) : columns;
  if (count > 0) {
    launch_fused_swiglu(g.data_ptr(), u.data_ptr(), out.data_ptr(), count / columns, columns, gate_stride,
                        up_stride, dtype_of(g, kOp), act, current_stream(guard.device()));
  }
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(hf_fastpath, CUDA, m) { m.impl("fused_swiglu", TORCH_BOX(&fused_swiglu)); }

}  // namespace hf_fastpath
