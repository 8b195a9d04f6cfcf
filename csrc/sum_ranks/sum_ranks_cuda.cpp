// torch.ops.hf_fastpath.sum_ranks on a GPU: see hf_fastpath/ops/sum_ranks.py for the contract.
#include "common/cuda_glue.h"
#include "common/peers_glue.h"
#include "sum_ranks/sum_ranks.h"

namespace hf_fastpath {
namespace {

Tensor sum_ranks(const Tensor& x, const std::vector<Tensor>& buffers, const Tensor& status, int64_t rank,
                 int64_t slot, const std::optional<Tensor>& residual, bool programmatic_launch) {
  constexpr const char* kOp = "sum_ranks";
  const DeviceGuard guard(x);
  const PeerParams peers = peers_of(x, buffers, status, rank, slot, kOp);
  std::optional<Tensor> more;
  if (residual) {
    STD_TORCH_CHECK(residual->scalar_type() == x.scalar_type() && sizes_of(*residual) == sizes_of(x),
                    "hf_fastpath::sum_ranks: residual does not match x");
    more = aligned(*residual);
  }
  Tensor out = empty_like_with_sizes(x, sizes_of(x));
  launch_sum_ranks({x.data_ptr(), data_or_null(more), out.data_ptr(), x.numel(), peers, dtype_of(x, kOp),
                    programmatic_launch},
                   current_stream(guard.device()));
  return out;
}

}  // namespace

HF_FASTPATH_KERNEL(CUDA, "sum_ranks", sum_ranks)

}  // namespace hf_fastpath
