// torch.ops.hf_fastpath.bytes_sum on a GPU: see hf_fastpath/ops/bytes_sum.py for the contract.
#include "bytes_sum/bytes_sum.h"
#include "bytes_sum/bytes_sum_glue.h"
#include "common/cuda_glue.h"

namespace hf_fastpath {
namespace {

Tensor bytes_sum(const std::vector<Tensor>& tensors) {
  const std::vector<SummedBytes> found = summed_bytes(tensors);
  const DeviceGuard guard(tensors[0]);
  const cudaStream_t stream = current_stream(guard.device());
  Tensor out = empty_sum(tensors[0]);
  uint64_t* sum = static_cast<uint64_t*>(out.mutable_data_ptr());
  HF_FASTPATH_CUDA_CHECK(cudaMemsetAsync(sum, 0, sizeof(*sum), stream));
  for (size_t first = 0; first < found.size(); first += kMostSpans) {
    SumSpans spans{};
    spans.count = static_cast<int>(std::min<size_t>(kMostSpans, found.size() - first));
    spans.place = found[first].place;
    for (int i = 0; i < spans.count; ++i) {
      spans.data[i] = found[first + i].data;
      spans.bytes[i] = found[first + i].bytes;
    }
    launch_bytes_sum(spans, sum, stream);
  }
  return out;
}

}  // namespace

HF_FASTPATH_KERNEL(CUDA, "bytes_sum", bytes_sum)

}  // namespace hf_fastpath
