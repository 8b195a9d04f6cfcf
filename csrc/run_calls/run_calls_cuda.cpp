// torch.ops.hf_fastpath.run_calls on a GPU: see hf_fastpath/decode/run/native_calls.py for the contract.
#include "run_calls/run_calls_glue.h"
#include "run_calls/views_glue.h"

HF_FASTPATH_CALL_LISTS(CUDA)
