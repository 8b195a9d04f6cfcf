// rope_append into caches in pages.
#pragma once

#include "common/pages.h"
#include "rope_append/rope_append.h"

namespace hf_fastpath {

// `params` as for launch_rope_append, the caches being [pages, num_kv_heads, page size, head_dim] of floats.
// With a kv_table, [layers, kPagedTableColumns], capacity and address of the block table come from there.
void launch_rope_append_paged(const RopeAppendParams& params, const Pages& pages, bool programmatic_launch,
                              cudaStream_t stream);

}  // namespace hf_fastpath
