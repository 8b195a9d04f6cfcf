// Which kernels do something on the current device, for the table of routes.
#include "common/routes_cuda.h"
#include "common/wgmma.cuh"

namespace hf_fastpath {

bool has_cuda_code(CudaCode code) {
  switch (code) {
    case CudaCode::kAny:
      return true;
    case CudaCode::kHopper:
      return has_hopper_code();
    case CudaCode::kWgmma:
      return has_wgmma_code();
  }
  return false;
}

}  // namespace hf_fastpath
