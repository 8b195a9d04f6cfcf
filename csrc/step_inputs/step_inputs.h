// The arguments of step_inputs. This file is free of torch.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace hf_fastpath {

constexpr int kMaxGathered = 9;  // tables, the embedding among them

// A table of which rows are taken, [count, width], rows `stride` elements apart.
struct GatheredTable {
  const void* rows;
  int64_t count, stride;
  int width;
  void* out;  // [tokens, width] contiguous
};

struct StepInputsParams {
  GatheredTable tables[kMaxGathered];  // the embedding first, by token; the others by position
  GatheredTable position_embedding;    // added to the embedding; rows null: none
  int64_t position_offset;             // of its rows
  const int64_t* token_ids;            // [tokens]
  const int64_t* positions;            // [tokens]
  int tokens, num_tables;
  DType dtype;
};

}  // namespace hf_fastpath
