// step_inputs on the CPU: copies of a few rows.
#include <cstring>
#include <stdexcept>
#include <string>

#include "common/cpu_glue.h"
#include "common/cpu_math.h"
#include "step_inputs/step_inputs_glue.h"

namespace hf_fastpath {
namespace {

constexpr const char* kRemedy =
    "the tokenizer and the model have to belong together, and positions to lie within what the model has "
    "learned";

// Python gets std::out_of_range as an IndexError, which torch.nn.functional.embedding raises, too.
const void* row_of(const GatheredTable& table, int64_t row, DType dtype, const char* what) {
  if (row < 0 || row >= table.count) {
    throw std::out_of_range("hf_fastpath::step_inputs: the " + std::string(what) + " " + std::to_string(row) +
                            " is outside of its table of " + std::to_string(table.count) +
                            " rows: " + kRemedy);
  }
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
      std::memcpy(at(table.out, int64_t(token) * table.width, p.dtype),
                  row_of(table, row, p.dtype, i == 0 ? "token" : "position"),
                  static_cast<size_t>(table.width * element_size(p.dtype)));
    }
    if (p.position_embedding.rows == nullptr) continue;
    const void* added =
        row_of(p.position_embedding, p.positions[token] + p.position_offset, p.dtype, "position");
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

HF_FASTPATH_KERNEL(CPU, "step_inputs", step_inputs)

}  // namespace
}  // namespace hf_fastpath
