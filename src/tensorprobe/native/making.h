// Whether notes on a module still hold: what `record.making._Known.holds_for` compares.
#pragma once

#include <vector>

#include "asking.h"

namespace tensorprobe {

// What notes on a module were made of. It asks Python nothing.
class Made {
 public:
  // `told` is what `_Known.told` gives: the notes, the number of attributes, names and values of
  // those that cannot change, names and types of others, and of parameters, buffers and children
  // the names and types; and the same of holders among the children.
  explicit Made(PyObject* told) {
    PyObject *notes, *names, *values, *others, *kinds, *holders;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(told, "O!nO!O!O!O!O!", &PyList_Type, &notes, &count, &PyTuple_Type,
                          &names, &PyTuple_Type, &values, &PyTuple_Type, &others, &PyTuple_Type,
                          &kinds, &PyTuple_Type, &holders)) {
      throw python_error();
    }
    TORCH_CHECK(PyTuple_GET_SIZE(names) == PyTuple_GET_SIZE(values), "a value for every name");
    TORCH_CHECK(PyTuple_GET_SIZE(kinds) == 5, "five kinds of things");
    told_ = Ref::borrow(told);
    notes_ = notes, count_ = count, names_ = names, values_ = values, others_ = others;
    for (size_t i = 0; i < 3; ++i) sections_[i] = PyTuple_GET_ITEM(kinds, i);
    other_kinds_ = PyTuple_GET_ITEM(kinds, 3);
    holders_ = holders;
    holder_kinds_ = PyTuple_GET_ITEM(kinds, 4);
  }

  PyObject* notes() const { return notes_; }
  int traverse(visitproc visit, void* arg) const { return told_.visit(visit, arg); }

  // Of a module by its attributes; false also where it cannot be told without Python.
  bool holds_for(PyObject* held) const {
    static PyObject* const names[] = {word<"_parameters">(),
                                      word<"_buffers">(),
                                      word<"_modules">()};
    if (PyDict_GET_SIZE(held) != count_) return false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names_); ++i) {
      if (found(held, PyTuple_GET_ITEM(names_, i)) != PyTuple_GET_ITEM(values_, i)) return false;
    }
    for (size_t i = 0; i < 3; ++i) {
      if (!are_alike(found(held, names[i]), sections_[i])) return false;
    }
    const Py_ssize_t n_others = PyTuple_GET_SIZE(others_);
    if (n_others != size_of(other_kinds_)) return false;
    for (Py_ssize_t i = 0; i < n_others; ++i) {
      PyObject* value = found(held, PyTuple_GET_ITEM(others_, i));
      if (value == nullptr || !is_of(value, PyList_GET_ITEM(other_kinds_, i))) return false;
    }
    const Py_ssize_t n_holders = PyTuple_GET_SIZE(holders_);
    if (n_holders != size_of(holder_kinds_)) return false;
    for (Py_ssize_t i = 0; i < n_holders; ++i) {
      if (!holds_alike(found(held, names[2]), PyTuple_GET_ITEM(holders_, i),
                       PyList_GET_ITEM(holder_kinds_, i))) {
        return false;
      }
    }
    return true;
  }

 private:
  // Borrowed; none where it is not there, or where Python would have to be asked.
  static PyObject* found(PyObject* held, PyObject* name) {
    if (held == nullptr || !PyDict_CheckExact(held) || !PyUnicode_CheckExact(name)) return nullptr;
    PyObject* value = PyDict_GetItemWithError(held, name);
    if (value == nullptr) PyErr_Clear();
    return value;
  }

  static bool is_of(PyObject* value, PyObject* kind) {
    return reinterpret_cast<PyObject*>(Py_TYPE(value)) == kind;
  }

  static Py_ssize_t size_of(PyObject* list) {
    return PyList_CheckExact(list) ? PyList_GET_SIZE(list) : 0;
  }

  // Whether a dict has these names and types in this order: all names, then all types, or None.
  static bool are_alike(PyObject* dict, PyObject* kinds) {
    if (dict == nullptr || !PyDict_CheckExact(dict)) return false;
    const Py_ssize_t count = PyDict_GET_SIZE(dict);
    if (kinds == Py_None) return count == 0;
    if (!PyTuple_CheckExact(kinds) && !PyList_CheckExact(kinds)) return false;
    if (PySequence_Fast_GET_SIZE(kinds) != 2 * count) return false;
    PyObject** expected = PySequence_Fast_ITEMS(kinds);
    PyObject *name, *value;
    Py_ssize_t at = 0, i = 0;
    while (PyDict_Next(dict, &at, &name, &value)) {
      if (!is_same(name, expected[i]) || !is_of(value, expected[count + i])) return false;
      ++i;
    }
    return true;
  }

  static bool is_same(PyObject* name, PyObject* other) {
    if (name == other) return true;
    return PyUnicode_CheckExact(name) && PyUnicode_CheckExact(other) &&
           PyUnicode_Compare(name, other) == 0;
  }

  static bool holds_alike(PyObject* children, PyObject* name, PyObject* kinds) {
    PyObject* const modules = word<"_modules">();
    const Ref child = Ref::borrow(found(children, name));  // what is made may free it
    if (!child || child.get() == Py_None) return false;
    const Ref held = Ref::steal(PyObject_GenericGetDict(child.get(), nullptr));
    if (!held) {
      PyErr_Clear();
      return false;
    }
    return are_alike(found(held.get(), modules), kinds);
  }

  Ref told_;  // has all of these
  PyObject *notes_, *names_, *values_, *others_, *other_kinds_, *holders_, *holder_kinds_;
  PyObject* sections_[3];
  Py_ssize_t count_;
};

}  // namespace tensorprobe
