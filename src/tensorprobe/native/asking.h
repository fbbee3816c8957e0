// Asking objects of Python for what they have, in few words; what fails is thrown.
#pragma once

#include <algorithm>

#include "attributes.h"
#include "python.h"

namespace tensorprobe {

template <size_t N>
struct Text {
  constexpr Text(const char (&from)[N]) { std::copy_n(from, N, text); }
  constexpr std::string_view view() const { return {text, N - 1}; }
  char text[N];
};

// A text of Python's, made once: a key of a dict, a role, a keyword.
template <Text said>
PyObject* literal() {
  static PyObject* const made = PyUnicode_InternFromString(said.text);
  return made;
}

// The name of an attribute, which the table of attributes.h has.
template <Text name>
PyObject* word() {
  static_assert(is_declared(name.view()), "add it to the table in attributes.h");
  return literal<name>();
}

template <Text name>
Ref attribute(const Ref& object) {
  return must(PyObject_GetAttr(object.get(), word<name>()));
}

template <Text name>
bool is_set(const Ref& object) {
  const Ref found = attribute<name>(object);
  if (found.get() == Py_True || found.get() == Py_False) return found.get() == Py_True;
  const int truth = PyObject_IsTrue(found.get());
  if (truth < 0) throw python_error();
  return truth;
}

template <Text name>
void set(const Ref& object) {
  if (PyObject_SetAttr(object.get(), word<name>(), Py_True) < 0) throw python_error();
}

template <Text name, typename... Given>
Ref method(const Ref& object, Given... given) {
  PyObject* arguments[] = {object.get(), given...};
  return must(PyObject_VectorcallMethod(word<name>(), arguments, 1 + sizeof...(given), nullptr));
}

template <typename... Items>
Ref tuple_of(Items... items) {
  return must(PyTuple_Pack(sizeof...(items), items...));
}

inline Ref whole_number(int64_t number) { return must(PyLong_FromLongLong(number)); }

}  // namespace tensorprobe
