// The key of a Python stack: what `capture.stacks` walks.
#pragma once

#include "python.h"

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
  return Ref::steal(PyObject_GetAttrString(frame.get(), "f_lasti"));
#endif
}

// (base_id, code, place, code, place, ...) from `depth` frames above the caller's, up to `base`; 0
// in place of the first where `base` is not met in so many frames.
inline PyObject* walk_stack(long depth, PyObject* base, PyObject* base_id, long most) {
  Ref frame = Ref::borrow(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  for (; frame && depth > 0; --depth) frame = back(frame);
  if (!frame) {
    PyErr_SetString(PyExc_ValueError, "call stack is not deep enough");
    return nullptr;
  }
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

}  // namespace tensorprobe
