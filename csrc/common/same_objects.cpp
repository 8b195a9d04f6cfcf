// Whether Python containers hold the objects that they held: a walk over pointers, by functions of CPython's
// stable interface, which the caller hands over, so that the library depends on no Python. Part of both
// libraries.
#include <cstdint>

using Object = void;

namespace {

enum Kind : uint8_t { ITEMS_OF_DICT = 0, LIST = 1, ATTRIBUTES = 2, CHOSEN_ITEMS = 3 };

struct Python {
  intptr_t (*dict_size)(Object*);
  Object* (*item_of_dict)(Object*, Object*);
  int (*next_of_dict)(Object*, intptr_t*, Object**, Object**);
  intptr_t (*list_size)(Object*);
  Object* (*list_item)(Object*, intptr_t);
  Object* (*attributes)(Object*, void*);
  Object* (*type)(Object*);
  void (*release)(Object*);
};

// Keys and values in turn, in the order of the dict; a value that may be any is a null pointer.
bool has_items(const Python& python, Object* dict, int64_t size, Object* const* before) {
  intptr_t place = 0;
  Object *key, *value;
  for (int64_t item = 0; item < size; ++item, before += 2)
    if (!python.next_of_dict(dict, &place, &key, &value) || key != before[0] ||
        (before[1] && value != before[1]))
      return false;
  return true;
}

// The same as has_items() of some keys; a null pointer ends them.
bool has_chosen_items(const Python& python, Object* dict, Object* const* before) {
  for (; before[0]; before += 2)
    if (python.item_of_dict(dict, before[0]) != before[1]) return false;
  return true;
}

bool has_entries(const Python& python, Object* list, int64_t size, Object* const* before) {
  for (int64_t entry = 0; entry < size; ++entry)
    if (python.list_item(list, entry) != before[entry]) return false;
  return true;
}

bool has_attributes(const Python& python, Object* object, Object* const* before) {
  Object *attributes = python.attributes(object, nullptr), *type = python.type(object);
  python.release(attributes);
  python.release(type);
  return attributes == before[0] && type == before[1];
}

}  // namespace

// Returns the first container from `begin` on that does not hold what it held; `count` if all do. To be
// called by a thread that holds Python's lock.
//
// python      PyDict_Size, PyDict_GetItem, PyDict_Next, PyList_Size, PyList_GetItem, PyObject_GenericGetDict,
//             PyObject_Type and Py_DecRef.
// containers  `count` dicts, lists and objects that have a dict of attributes, of the given kinds, with their
// sizes. before      the objects of all containers; those of container i begin at starts[i].
extern "C" __attribute__((visibility("default"))) int64_t hf_fastpath_first_changed(
    const Python* python, Object* const* containers, const uint8_t* kinds, const int64_t* sizes,
    const int64_t* starts, Object* const* before, int64_t count, int64_t begin) {
  for (int64_t i = begin; i < count; ++i) {
    Object* container = containers[i];
    if (kinds[i] == ATTRIBUTES) {
      if (!has_attributes(*python, container, before + starts[i])) return i;
      continue;
    }
    const bool is_list = kinds[i] == LIST;
    if ((is_list ? python->list_size(container) : python->dict_size(container)) != sizes[i]) return i;
    Object* const* held = before + starts[i];
    if (kinds[i] == CHOSEN_ITEMS) {
      if (!has_chosen_items(*python, container, held)) return i;
    } else if (!(is_list ? has_entries(*python, container, sizes[i], held)
                         : has_items(*python, container, sizes[i], held))) {
      return i;
    }
  }
  return count;
}
