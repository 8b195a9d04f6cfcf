// Views of PyTorch's between the ops of a list of calls: no element moves, and the dispatcher is not asked.
// This header is torch-facing.
#pragma once

#include <algorithm>

#include "common/callable_ops.h"

namespace hf_fastpath {

// Sizes and strides of a tensor, and a place in its memory: what a view changes.
struct ViewShape {
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;

  explicit ViewShape(const Tensor& tensor) : sizes(tensor.dim()), strides(tensor.dim()) {
    for (size_t i = 0; i < sizes.size(); ++i) {
      sizes[i] = tensor.size(static_cast<int64_t>(i));
      strides[i] = tensor.stride(static_cast<int64_t>(i));
    }
  }

  // The place of a dimension, which may be counted from the end.
  size_t place(int64_t dim, int64_t more = 0) const {
    const int64_t count = static_cast<int64_t>(sizes.size()) + more;
    STD_TORCH_CHECK(dim >= -count && dim < count, "hf_fastpath: a view in a list of calls has dimension ",
                    dim, ", expected ", -count, " to ", count - 1);
    return static_cast<size_t>(dim < 0 ? dim + count : dim);
  }

  // Keeps `length` positions of a dimension.
  void keep(size_t dim, int64_t start, int64_t length) {
    STD_TORCH_CHECK(start >= 0 && length >= 0 && start + length <= sizes[dim],
                    "hf_fastpath: a view in a list of calls begins at ", start, " and has ", length,
                    " positions, of ", sizes[dim]);
    offset += start * strides[dim];
    sizes[dim] = length;
  }

  void erase(size_t dim) {
    sizes.erase(sizes.begin() + static_cast<int64_t>(dim));
    strides.erase(strides.begin() + static_cast<int64_t>(dim));
  }

  void insert(size_t dim, int64_t size, int64_t stride) {
    sizes.insert(sizes.begin() + static_cast<int64_t>(dim), size);
    strides.insert(strides.begin() + static_cast<int64_t>(dim), stride);
  }

  Tensor of(const Tensor& tensor) const {
    AtenTensorHandle handle;
    TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(tensor.get(), static_cast<int64_t>(sizes.size()),
                                                          sizes.data(), strides.data(), offset, &handle));
    return Tensor(handle);
  }
};

inline Tensor select_view(const Tensor& self, int64_t dim, int64_t index) {
  ViewShape shape(self);
  const size_t place = shape.place(dim);
  shape.keep(place, index < 0 ? index + shape.sizes[place] : index, 1);
  shape.erase(place);
  return shape.of(self);
}

inline Tensor narrow_view(const Tensor& self, int64_t dim, int64_t start, int64_t length) {
  ViewShape shape(self);
  const size_t place = shape.place(dim);
  shape.keep(place, start < 0 ? start + shape.sizes[place] : start, length);
  return shape.of(self);
}

inline Tensor slice_view(const Tensor& self, int64_t dim, std::optional<int64_t> start,
                         std::optional<int64_t> end, int64_t step) {
  ViewShape shape(self);
  const size_t place = shape.place(dim);
  const int64_t size = shape.sizes[place];
  const auto inside = [&](int64_t at) {
    return std::min(std::max<int64_t>(at < 0 ? at + size : at, 0), size);
  };
  STD_TORCH_CHECK(step > 0, "hf_fastpath: a slice in a list of calls has step ", step,
                  ", expected 1 or more");
  const int64_t first = inside(start.value_or(0)), last = std::max(first, inside(end.value_or(size)));
  shape.keep(place, first, last - first);
  shape.sizes[place] = (last - first + step - 1) / step;
  shape.strides[place] *= step;
  return shape.of(self);
}

inline Tensor transpose_view(const Tensor& self, int64_t dim0, int64_t dim1) {
  ViewShape shape(self);
  const size_t one = shape.place(dim0), other = shape.place(dim1);
  std::swap(shape.sizes[one], shape.sizes[other]);
  std::swap(shape.strides[one], shape.strides[other]);
  return shape.of(self);
}

inline Tensor permute_view(const Tensor& self, const std::vector<int64_t>& dims) {
  const ViewShape before(self);
  ViewShape shape = before;
  STD_TORCH_CHECK(dims.size() == shape.sizes.size(), "hf_fastpath: permute in a list of calls has ",
                  dims.size(), " dimensions, expected ", shape.sizes.size());
  for (size_t i = 0; i < dims.size(); ++i) {
    shape.sizes[i] = before.sizes[before.place(dims[i])];
    shape.strides[i] = before.strides[before.place(dims[i])];
  }
  return shape.of(self);
}

inline Tensor unsqueeze_view(const Tensor& self, int64_t dim) {
  ViewShape shape(self);
  const size_t place = shape.place(dim, 1);
  const bool is_last = place == shape.sizes.size();
  shape.insert(place, 1, is_last ? 1 : shape.sizes[place] * shape.strides[place]);
  return shape.of(self);
}

inline Tensor squeeze_view(const Tensor& self, int64_t dim) {
  ViewShape shape(self);
  const size_t place = shape.place(dim);
  if (shape.sizes[place] == 1) shape.erase(place);
  return shape.of(self);
}

// The strides of a tensor's elements in their order in other sizes; nothing if these need a copy.
inline std::optional<std::vector<int64_t>> strides_in(const ViewShape& shape,
                                                      const std::vector<int64_t>& sizes) {
  struct Run {  // dimensions that lie in memory like one
    int64_t size, stride;
  };
  std::vector<Run> runs;
  for (size_t i = 0; i < shape.sizes.size(); ++i) {
    if (shape.sizes[i] == 1) continue;
    const Run run{shape.sizes[i], shape.strides[i]};
    if (!runs.empty() && runs.back().stride == run.size * run.stride) {
      runs.back() = {runs.back().size * run.size, run.stride};
    } else {
      runs.push_back(run);
    }
  }
  std::vector<int64_t> strides(sizes.size());
  Run left = runs.empty() ? Run{1, 1} : runs.back();
  if (!runs.empty()) runs.pop_back();
  for (size_t i = sizes.size(); i-- > 0;) {
    if (sizes[i] != 1 && left.size == 1 && !runs.empty()) {
      left = runs.back();
      runs.pop_back();
    }
    if (left.size % sizes[i] != 0) return std::nullopt;
    strides[i] = left.stride;
    left = {left.size / sizes[i], left.stride * sizes[i]};
  }
  return strides;
}

inline Tensor reshape_view(const Tensor& self, const std::vector<int64_t>& sizes) {
  ViewShape shape(self);
  std::vector<int64_t> wanted = sizes;
  int64_t known = 1;
  int64_t* open = nullptr;
  for (int64_t& each : wanted) {
    if (each == -1) open = &each;
    if (each != -1) known *= each;
  }
  const int64_t count = self.numel();
  if (open != nullptr) *open = known > 0 ? count / known : 0;
  STD_TORCH_CHECK(known * (open != nullptr ? *open : 1) == count,
                  "hf_fastpath: reshape in a list of calls makes ", known, " elements of ", count);
  const auto strides = count > 0 ? strides_in(shape, wanted) : std::nullopt;
  if (!strides) {  // elements have to move
    const Tensor moved = self.is_contiguous() ? self : torch::stable::contiguous(self);
    ViewShape dense(moved);
    dense.sizes = wanted;
    dense.strides.assign(wanted.size(), 1);
    for (size_t i = wanted.size(); i-- > 1;)
      dense.strides[i - 1] = dense.strides[i] * std::max<int64_t>(wanted[i], 1);
    return dense.of(moved);
  }
  shape.sizes = wanted;
  shape.strides = *strides;
  return shape.of(self);
}

inline Tensor expand_view(const Tensor& self, const std::vector<int64_t>& sizes, bool /*implicit*/) {
  ViewShape shape(self);
  STD_TORCH_CHECK(sizes.size() >= shape.sizes.size(), "hf_fastpath: expand in a list of calls has ",
                  sizes.size(), " sizes, expected ", shape.sizes.size(), " or more");
  while (shape.sizes.size() < sizes.size()) shape.insert(0, 1, 0);
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == -1 || sizes[i] == shape.sizes[i]) continue;
    STD_TORCH_CHECK(shape.sizes[i] == 1, "hf_fastpath: expand in a list of calls makes ", sizes[i], " of ",
                    shape.sizes[i]);
    shape.sizes[i] = sizes[i];
    shape.strides[i] = 0;
  }
  return shape.of(self);
}

inline std::vector<Tensor> split_sizes_view(const Tensor& self, const std::vector<int64_t>& sizes,
                                            int64_t dim) {
  std::vector<Tensor> parts;
  int64_t start = 0;
  for (const int64_t size : sizes) {
    parts.push_back(narrow_view(self, dim, start, size));
    start += size;
  }
  STD_TORCH_CHECK(start == self.size(static_cast<int64_t>(ViewShape(self).place(dim))),
                  "hf_fastpath: the parts of split_with_sizes in a list of calls have ", start, " positions");
  return parts;
}

inline std::vector<Tensor> split_view(const Tensor& self, int64_t size, int64_t dim) {
  const int64_t length = self.size(static_cast<int64_t>(ViewShape(self).place(dim)));
  STD_TORCH_CHECK(size > 0, "hf_fastpath: split in a list of calls has parts of ", size,
                  ", expected 1 or more");
  std::vector<int64_t> sizes;
  for (int64_t start = 0; start == 0 || start < length; start += size)
    sizes.push_back(std::min(size, length - start));
  return split_sizes_view(self, sizes, dim);
}

inline Tensor item_of_list(const std::vector<Tensor>& list, int64_t index) {
  const int64_t count = static_cast<int64_t>(list.size());
  STD_TORCH_CHECK(index >= -count && index < count, "hf_fastpath: a list of calls takes item ", index, " of ",
                  count);
  return list[static_cast<size_t>(index < 0 ? index + count : index)];
}

inline bool add_views() {
  return add_callable<&select_view>("aten::select.int") && add_callable<&narrow_view>("aten::narrow") &&
         add_callable<&slice_view>("aten::slice.Tensor") &&
         add_callable<&transpose_view>("aten::transpose.int") &&
         add_callable<&permute_view>("aten::permute") && add_callable<&unsqueeze_view>("aten::unsqueeze") &&
         add_callable<&squeeze_view>("aten::squeeze.dim") && add_callable<&reshape_view>("aten::reshape") &&
         add_callable<&expand_view>("aten::expand") &&
         add_callable<&split_sizes_view>("aten::split_with_sizes") &&
         add_callable<&split_view>("aten::split.Tensor") && add_callable<&item_of_list>("getitem");
}

inline const bool kHasViews = add_views();

}  // namespace hf_fastpath
