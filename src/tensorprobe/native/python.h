// What every part needs: Python's objects without leaks, and the tensors inside of them.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <Python.h>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <utility>

// Of ATen/functorch/DynamicLayer.h, which asks for headers that torch does not bring along.
namespace at::functorch {
struct DynamicLayer;
TORCH_API const std::vector<DynamicLayer>& getDynamicLayerStack();
}  // namespace at::functorch

namespace tensorprobe {

// A reference that is let go of; the interpreter is held wherever one is made or goes.
class Ref {
 public:
  Ref() = default;
  Ref(const Ref& other) : object_(other.object_) { Py_XINCREF(object_); }
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() { Py_XDECREF(object_); }

  static Ref steal(PyObject* object) {
    Ref ref;
    ref.object_ = object;
    return ref;
  }
  static Ref borrow(PyObject* object) {
    Py_XINCREF(object);
    return steal(object);
  }

  int visit(visitproc visit, void* arg) const { return object_ ? visit(object_, arg) : 0; }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

// Python's names for what C++ throws at it; every function that Python calls goes through here.
template <typename Body>
PyObject* guarded(Body body) noexcept {
  try {
    return body();
  } catch (python_error& error) {
    error.restore();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception&) {  // as torch: its own errors have types, and say where they are
    torch::translate_exception_to_python(std::current_exception());  // from only where that is asked
  }
  return nullptr;
}

// The attributes that an object of Python has itself, read and set where they are: of classes whose
// attributes are no properties. The object may change them as ever.
class Fields {
 public:
  Fields() = default;
  explicit Fields(PyObject* object) : dict_(Ref::steal(PyObject_GenericGetDict(object, nullptr))) {
    if (!dict_) throw python_error();
  }

  Ref get(PyObject* name) const {
    PyObject* found = PyDict_GetItemWithError(dict_.get(), name);
    if (found == nullptr) {
      if (!PyErr_Occurred()) PyErr_SetObject(PyExc_AttributeError, name);
      throw python_error();
    }
    return Ref::borrow(found);
  }
  void set(PyObject* name, PyObject* value) const {
    if (PyDict_SetItem(dict_.get(), name, value) < 0) throw python_error();
  }
  int visit(visitproc visit, void* arg) const { return dict_.visit(visit, arg); }

 private:
  Ref dict_;
};

// Of an object whose references the garbage collector has dropped.
constexpr const char* APART = "it is taken apart";

inline bool is_own_type(PyObject* object) {  // torch's own, not a subclass
  return THPVariable_CheckExact(object);
}

inline bool is_tensor(PyObject* object) {  // not what only says so, as a mock does
  return PyType_IsSubtype(Py_TYPE(object), reinterpret_cast<PyTypeObject*>(THPVariableClass));
}

inline const at::Tensor& tensor_in(PyObject* object) { return THPVariable_Unpack(object); }

// Whether a tensor is its strided memory, a version, and nothing else: no view of other numbers
// (negated, conjugated), no wrapper, not sparse, nested, without memory, or without a version.
inline bool is_plain(const at::TensorImpl& tensor) {
  constexpr int backends = static_cast<int>(c10::BackendComponent::EndOfBackendKeys);
  static const uint64_t usual =
      (c10::DispatchKeySet(c10::DispatchKey::Dense) |
       c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView) | c10::autograd_dispatch_keyset |
       c10::autocast_dispatch_keyset)
          .raw_repr() >> backends;
  const uint64_t kinds = tensor.key_set().raw_repr() >> backends;
  return !(kinds & ~usual) && tensor.layout() == c10::kStrided && !tensor.device().is_meta() &&
         tensor.version_counter().enabled() && !tensor.has_symbolic_sizes_strides() &&
         tensor.has_storage();
}

// What Python made, or its error is thrown.
inline Ref must(PyObject* fresh) {
  if (fresh == nullptr) throw python_error();
  return Ref::steal(fresh);
}

// Whether a body came to its end; if not, Python's error is set.
template <typename Body>
bool attempt(Body body) noexcept {
  return guarded([&]() -> PyObject* {
           body();
           return Py_None;
         }) != nullptr;
}

// The error that is set, taken away.
inline Ref taken() {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  if (trace != nullptr) PyException_SetTraceback(value, trace);
  Py_XDECREF(type);
  Py_XDECREF(trace);
  return Ref::steal(value);
}

// While there is one, tensors are read without any function mode or subclass taking notice.
class FunctionsOff {
 public:
  FunctionsOff() : before_(at::impl::PythonTorchFunctionTLS::get_disabled_state()) {
    at::impl::PythonTorchFunctionTLS::set_disabled_state(
        at::impl::TorchFunctionDisabledState::ALL_DISABLED);
  }
  ~FunctionsOff() { at::impl::PythonTorchFunctionTLS::set_disabled_state(before_); }
  FunctionsOff(const FunctionsOff&) = delete;
  FunctionsOff& operator=(const FunctionsOff&) = delete;

 private:
  const at::impl::TorchFunctionDisabledState before_;
};

}  // namespace tensorprobe
