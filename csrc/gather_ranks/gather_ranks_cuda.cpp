// torch.ops.hf_fastpath.gather_ranks on a GPU: see hf_fastpath/ops/gather_ranks.py for the contract.
#include "common/cuda_glue.h"
#include "common/peers_glue.h"
#include "gather_ranks/gather_ranks.h"

namespace hf_fastpath {
namespace {

Tensor gather_ranks(const Tensor& x, const std::vector<Tensor>& buffers, const Tensor& status, int64_t rank,
                    int64_t slot, bool programmatic_launch, int64_t first_end, int64_t second_end) {
  constexpr const char* kOp = "gather_ranks";
  const DeviceGuard guard(x);
  const PeerParams peers = peers_of(x, buffers, status, rank, slot, kOp);
  STD_TORCH_CHECK(x.dim() >= 1 && x.size(x.dim() - 1) % 8 == 0,
                  "hf_fastpath::gather_ranks: x has to have a multiple of 8 features");
  const int64_t features = x.size(x.dim() - 1);
  STD_TORCH_CHECK(0 <= first_end && first_end <= second_end && second_end <= features && first_end % 8 == 0 &&
                      second_end % 8 == 0,
                  "hf_fastpath::gather_ranks: ends of parts have to be multiples of 8 in order");
  Tensor out = empty_like_with_sizes(x, sizes_with_last(x, features * peers.size));
  const int64_t bytes = static_cast<int64_t>(element_size(dtype_of(x, kOp)));
  launch_gather_ranks(
      {x.data_ptr(), out.data_ptr(), features > 0 ? x.numel() / features : 0, features * bytes / 16,
       first_end * bytes / 16, second_end * bytes / 16, peers, programmatic_launch},
      current_stream(guard.device()));
  return out;
}

}  // namespace

HF_FASTPATH_KERNEL(CUDA, "gather_ranks", gather_ranks)

}  // namespace hf_fastpath
