// What differs between versions of torch, and of Python, in C++.
#pragma once

#include <ATen/record_function.h>
#include <Python.h>

#include <cstring>
#include <string>

namespace tensorprobe {

// A hook says here what it is to a compiled backward. Torch's own is const from 2.7 on, so one of
// these two overrides it.
#define COMPILED_ARGS(args)                                                        \
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) {            \
    say_compiled_args(args);                                                       \
  }                                                                                \
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const {      \
    say_compiled_args(args);                                                       \
  }                                                                                \
  void say_compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const

// Whether the name of an operator's overload has this in it. 2.1 tells no overload, but a copy of
// the whole name.
template <typename Function>
bool overload_has(const Function& function, const char* text) {
  if constexpr (requires { function.overload_name(); }) {
    return std::strstr(function.overload_name(), text) != nullptr;
  } else {
    const auto name = function.operator_name();
    return name && name->overload_name.find(text) != std::string::npos;
  }
}

// The type of a bound method that is written in C, such as `None.__str__`. Its name is in no header
// of Python from 3.13 on.
inline PyTypeObject* method_wrapper_type() {
  static PyTypeObject* const type = [] {
    PyObject* method = PyObject_GetAttrString(Py_None, "__str__");
    PyTypeObject* found = method == nullptr ? nullptr : Py_TYPE(method);
    Py_XDECREF(method);
    PyErr_Clear();
    return found;
  }();
  return type;
}

}  // namespace tensorprobe
