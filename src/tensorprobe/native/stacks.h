// Stacks of Python and their numbers: what `follow.stacks` does for those that it has seen.
#pragma once

#include "asking.h"

namespace tensorprobe {

inline Ref back(const Ref& frame) {
  auto* object = reinterpret_cast<PyFrameObject*>(frame.get());
  return Ref::steal(reinterpret_cast<PyObject*>(PyFrame_GetBack(object)));
}

inline Ref place_in(const Ref& frame) {  // how far its code has come
#if PY_VERSION_HEX >= 0x030B0000
  auto* object = reinterpret_cast<PyFrameObject*>(frame.get());
  return Ref::steal(PyLong_FromLong(PyFrame_GetLasti(object)));
#else
  return attribute<"f_lasti">(frame);
#endif
}

// The frame that has called the function of Python which calls this; none in a thread without one.
inline Ref calling_frame() {
  const Ref own = Ref::borrow(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  return own ? back(own) : Ref();
}

// (base_id, code, place, code, place, ...) from `frame` outwards, up to `base`; 0 in place of the
// first where `base` is not met in so many frames.
inline PyObject* walk_stack(Ref frame, PyObject* base, PyObject* base_id, long most) {
  std::vector<Ref> parts;
  for (; frame && frame.get() != base && most > 0; --most, frame = back(frame)) {
    auto* object = reinterpret_cast<PyFrameObject*>(frame.get());
    const Ref code = Ref::steal(reinterpret_cast<PyObject*>(PyFrame_GetCode(object)));
    parts.push_back(Ref::steal(PyLong_FromVoidPtr(code.get())));
    parts.push_back(place_in(frame));
    if (!parts.back() || !parts[parts.size() - 2]) return nullptr;
  }
  const bool met = frame ? frame.get() == base : base == Py_None;
  Ref key = Ref::steal(PyTuple_New(parts.size() + 1));
  if (!key) return nullptr;
  PyTuple_SET_ITEM(key.get(), 0, met ? Py_NewRef(base_id) : PyLong_FromLong(0));
  for (size_t i = 0; i < parts.size(); ++i) {
    PyTuple_SET_ITEM(key.get(), i + 1, parts[i].release());
  }
  return key.release();
}

// The numbers that a `Stacks` has given.
class StackTable {
 public:
  StackTable() = default;
  explicit StackTable(const Ref& stacks) : stacks_(stacks) {
    const Ref tables = method<"tables">(stacks);
    PyObject *known, *frames, *told;
    if (!PyArg_ParseTuple(tables.get(), "O!O!O!", &PyDict_Type, &known, &PyDict_Type, &frames,
                          &PySet_Type, &told)) {
      throw python_error();
    }
    known_ = Ref::borrow(known);
    frames_ = Ref::borrow(frames);
    told_ = Ref::borrow(told);
  }

  // As `Stacks.current`, of a thread that is at `place`. `tell(number, frames)` writes down a stack that this step has not been told;
  // Python does where it gives false.
  template <typename Tell>
  Ref number(PyObject* place, const Ref& frame, Tell tell) const {
    static PyObject* const none = PyLong_FromLong(0);
    const Ref base = found(place, word<"frame">()), base_id = found(place, word<"stack">());
    TORCH_CHECK(base && base_id, "a thread has no place");
    const bool is_known = static_cast<bool>(found(frames_.get(), base_id.get()));
    const Ref key = must(is_known ? walk_stack(frame, base.get(), base_id.get(), MAX_FRAMES)
                                  : walk_stack(frame, Py_None, none, MAX_FRAMES));
    const Ref number = found(known_.get(), key.get());
    if (number && (is_told(number) || tells(number, tell))) return number;
    PyObject* outer = frame ? frame.get() : Py_None;
    return method<"current">(stacks_, outer, base.get(), base_id.get());
  }

  int traverse(visitproc visit, void* arg) const {
    for (const Ref* ref : {&stacks_, &known_, &frames_, &told_}) {
      if (int stop = ref->visit(visit, arg)) return stop;
    }
    return 0;
  }

 private:
  static constexpr long MAX_FRAMES = 200;

  static Ref found(PyObject* dict, PyObject* key) {
    PyObject* value = PyDict_GetItemWithError(dict, key);
    if (value == nullptr && PyErr_Occurred()) throw python_error();
    return Ref::borrow(value);
  }

  bool is_told(const Ref& number) const {
    const int told = PySet_Contains(told_.get(), number.get());
    if (told < 0) throw python_error();
    return told;
  }

  // Every step is told its stacks.
  template <typename Tell>
  bool tells(const Ref& number, Tell tell) const {
    const Ref frames = found(frames_.get(), number.get());
    if (!frames || !tell(number, frames)) return false;
    if (PySet_Add(told_.get(), number.get()) < 0) throw python_error();
    return true;
  }

  Ref stacks_, known_, frames_, told_;
};

}  // namespace tensorprobe
