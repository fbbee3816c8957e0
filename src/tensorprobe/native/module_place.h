// Where the program is, for a guard: what `overflow.call_site` and `overflow.module_place` do.
#pragma once

#include <vector>

#include "asking.h"
#include "stacks.h"

namespace tensorprobe {

// As `overflow.call_site.trail_from`.
inline Ref trail_from(Ref frame, PyObject* base, PyObject* rest) {
  constexpr size_t most = 200;
  std::vector<Ref> found;
  found.reserve(16);
  while (frame && frame.get() != base && found.size() < 2 * most) {
    auto* object = reinterpret_cast<PyFrameObject*>(frame.get());
    found.push_back(must(reinterpret_cast<PyObject*>(PyFrame_GetCode(object))));
    found.push_back(must(place_in(frame).release()));
    frame = back(frame);
  }
  const bool is_base = frame ? frame.get() == base : base == Py_None;
  Ref trail = must(PyTuple_New(found.size() + 1));
  for (size_t i = 0; i < found.size(); ++i) {
    PyTuple_SET_ITEM(trail.get(), i, found[i].release());
  }
  PyTuple_SET_ITEM(trail.get(), found.size(), Py_NewRef(is_base ? rest : Py_None));
  return trail;
}

// The frame of whoever called the function of Python that calls this.
inline Ref callers_frame(const Ref& getframe) {
  static PyObject* const one = PyLong_FromLong(1);
  return must(PyObject_CallOneArg(getframe.get(), one));
}

// Into modules inside of others, and out of them; roots are Python's.
class ModuleTrails {
 public:
  // `stay` is the type of entries, a tuple; `generated` that of modules which dynamo may make.
  ModuleTrails(PyObject* hooks, PyTypeObject* stay, PyTypeObject* generated, PyObject* getframe)
      : hooks_(Ref::borrow(hooks)),
        stay_(Ref::borrow(reinterpret_cast<PyObject*>(stay))),
        generated_(Ref::borrow(reinterpret_cast<PyObject*>(generated))),
        getframe_(Ref::borrow(getframe)) {}

  // As `_enter`; false where Python has to.
  bool enter(PyObject* module) const {
    if (!hooks_ || PyType_IsSubtype(Py_TYPE(module), type(generated_))) return false;
    if (attribute<"around">(hooks_).get() != Py_None) return false;
    const Ref entries = attribute<"entries">(attribute<"thread">(hooks_));
    const Ref inner = last(entries);
    if (!inner) return false;
    const Ref path = path_of(module);
    if (!path) return false;
    const Ref frame = callers_frame(getframe_);
    const Ref trail = trail_from(frame, PyTuple_GET_ITEM(inner.get(), FRAME),
                                 PyTuple_GET_ITEM(inner.get(), TRAIL));
    // that call was left by a KeyboardInterrupt or the like
    if (PyTuple_GET_ITEM(trail.get(), PyTuple_GET_SIZE(trail.get()) - 1) == Py_None) return false;
    const Ref place = attribute<"place">(hooks_);
    const Ref outer = attribute<"here">(place);
    const Ref here = tuple_of(path.get(), frame.get(), trail.get());
    const Ref stay = must(type(stay_)->tp_alloc(type(stay_), FIELDS));
    PyObject* fields[] = {module, frame.get(), trail.get(), outer.get(), Py_None};
    for (Py_ssize_t i = 0; i < FIELDS; ++i) {
      PyTuple_SET_ITEM(stay.get(), i, Py_NewRef(fields[i]));
    }
    go_to(place, here);
    if (PyList_Append(entries.get(), stay.get()) < 0) throw python_error();
    return true;
  }

  // As `_leave`.
  bool leave(PyObject* module) const {
    if (!hooks_) return false;
    const Ref entries = attribute<"entries">(attribute<"thread">(hooks_));
    const Ref inner = last(entries);
    const Py_ssize_t count = PyList_GET_SIZE(entries.get());
    if (!inner || count == 1 || PyTuple_GET_ITEM(inner.get(), MODULE) != module) return false;
    const Ref place = attribute<"place">(hooks_);
    go_to(place, Ref::borrow(PyTuple_GET_ITEM(inner.get(), OUTER)));
    if (PyList_SetSlice(entries.get(), count - 1, count, nullptr) < 0) throw python_error();
    return true;
  }

  int traverse(visitproc visit, void* arg) const {
    for (const Ref* ref : {&hooks_, &stay_, &generated_}) {
      if (int stop = ref->visit(visit, arg)) return stop;
    }
    return 0;
  }
  void let_go() { hooks_ = Ref(); }

 private:
  enum Field { MODULE, FRAME, TRAIL, OUTER, CALL, FIELDS };

  static PyTypeObject* type(const Ref& ref) { return reinterpret_cast<PyTypeObject*>(ref.get()); }

  // The module call that is under way; none where there is none, or it is not as it should be.
  Ref last(const Ref& entries) const {
    TORCH_CHECK(PyList_CheckExact(entries.get()), "entries come as a list");
    const Py_ssize_t count = PyList_GET_SIZE(entries.get());
    if (!count) return Ref();
    Ref found = Ref::borrow(PyList_GET_ITEM(entries.get(), count - 1));
    const bool is_stay = Py_TYPE(found.get()) == type(stay_) && Py_SIZE(found.get()) == FIELDS;
    return is_stay ? found : Ref();
  }

  // As `ModulePaths.path` of modules that are known.
  Ref path_of(PyObject* module) const {
    const Ref paths = attribute<"_paths">(attribute<"paths">(hooks_));
    const Ref key = must(PyLong_FromVoidPtr(module));
    TORCH_CHECK(PyDict_CheckExact(paths.get()), "paths come as a dict");
    const Ref known = Ref::borrow(PyDict_GetItemWithError(paths.get(), key.get()));
    if (!known || !PyTuple_CheckExact(known.get()) || PyTuple_GET_SIZE(known.get()) != 2) {
      return Ref();
    }
    const Ref alive = must(PyObject_CallNoArgs(PyTuple_GET_ITEM(known.get(), 0)));
    return alive.get() == module ? Ref::borrow(PyTuple_GET_ITEM(known.get(), 1)) : Ref();
  }

  static void go_to(const Ref& place, const Ref& here) {
    if (PyObject_SetAttr(place.get(), word<"here">(), here.get()) < 0) throw python_error();
  }

  Ref hooks_, stay_, generated_, getframe_;
};

}  // namespace tensorprobe
