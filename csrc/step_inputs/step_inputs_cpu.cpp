// step_inputs on the CPU: copies of a few rows.
#include <cstring>

#include "common/cpu_glue.h"
#include "common/cpu_math.h"
#include "step_inputs/step_inputs_glue.h"

namespace hf_fastpath {
namespace {

const void* row_of(const GatheredTable& table, int64_t row, DType dtype) {
  STD_TORCH_CHECK(row >= 0 && row < table.count, "hf_fastpath::step_inputs: a token or position is ", row,
                  ", outside of its table of ", table.count,
                  " rows: the tokenizer and the model have to belong together");
  return at(table.rows, row * table.stride, dtype);
}

std::vector<Tensor> step_inputs(const Tensor& embedding, const Tensor& tokens, const Tensor& positions,
                                const std::optional<Tensor>& position_embedding, int64_t position_offset,
                                const std::vector<Tensor>& tables) {
  StepInputsCall call(embedding, tokens, positions, position_embedding, position_offset, tables);
  const StepInputsParams& p = call.params;
  for (int token = 0; token < p.tokens; ++token) {
    for (int i = 0; i < p.num_tables; ++i) {
      const GatheredTable& table = p.tables[i];
      const int64_t row = i == 0 ? p.token_ids[token] : p.positions[token];
      std::memcpy(at(table.out, int64_t(token) * table.width, p.dtype), row_of(table, row, p.dtype),
                  static_cast<size_t>(table.width * element_size(p.dtype)));
    }
    if (p.position_embedding.rows == nullptr) continue;
    const void* added = row_of(p.position_embedding, p.positions[token] + p.position_offset, p.dtype);
    void* out = at(p.tables[0].out, int64_t(token) * p.tables[0].width, p.dtype);
    with_storage(p.dtype, [&](auto* tag) {
      using T = std::remove_pointer_t<decltype(tag)>;
      for (int e = 0; e < p.tables[0].width; ++e) {
        T* to = static_cast<T*>(out) + e;
        from_float(to_float(*to) + to_float(static_cast<const T*>(added)[e]), to);
      }
    });
  }
  return call.outputs;
}

STABLE_TORCH_LIBRARY_IMPL(hf_fastpath, CPU, m) { m.impl("step_inputs", TORCH_BOX(&step_inputs)); }

}  // namespace
}  // namespace hf_fastpath
