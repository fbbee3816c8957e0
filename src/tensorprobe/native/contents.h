// Contents that have a number: what `capture.values.Values` does of plain tensors.
#pragma once

#include <string>
#include <unordered_map>

#include "python.h"
#include "writes.h"

namespace tensorprobe {

// What tells one content from another, as in capture/values.py.
struct View {
  uint64_t mark;
  int64_t version;
  int64_t offset;
  int64_t form;

  bool operator==(const View& other) const {
    return mark == other.mark && version == other.version && offset == other.offset &&
           form == other.form;
  }
};

inline uint64_t mix(uint64_t hash, uint64_t value) {
  return (hash ^ value) * 0x9E3779B97F4A7C15ull ^ (hash >> 29);
}

struct HashView {
  size_t operator()(const View& view) const {
    return mix(mix(mix(mix(1, view.mark), view.version), view.offset), view.form);
  }
};

class Contents {
 public:
  // `otherwise` and `forget` are what Python does of tensors that are not plain. `make` gives a new
  // content a number; where statistics are all that is wanted `submit` starts on them, and `value`
  // takes the number and the result. None: they are not all. `marks` is what Python knows of the
  // storages of other tensors.
  Contents(Ref otherwise, Ref forget, Ref make, Ref submit, Ref value, Ref marks)
      : otherwise_(std::move(otherwise)),
        forget_(std::move(forget)),
        make_(std::move(make)),
        submit_(std::move(submit)),
        value_(std::move(value)),
        marks_(std::move(marks)) {}

  // Whether to see by itself what is written to.
  void watch_writes(bool on) {
    if (!on) forget_written();
    writes_.watch(on);
  }

  bool saw_scaler() const { return writes_.saw_scaler(); }

  // The number of a content; `make` gives a new one its own.
  PyObject* of(PyObject* tensor, PyObject* form, PyObject* call, PyObject* role, PyObject* label,
               PyObject* keep) {
    TORCH_CHECK(make_, APART);
    if (writes_.any()) forget_written();
    if (!is_tensor(tensor) || !is_plain(*tensor_in(tensor).unsafeGetTensorImpl())) {
      PyObject* arguments[] = {tensor, form, call, role, label, keep};
      return PyObject_Vectorcall(otherwise_.get(), arguments, 6, nullptr);
    }
    return of_plain(tensor, form, call, role, label, keep);
  }

  // Whether a content needs no more than statistics: nobody asks whose it is.
  bool is_nameless(PyObject* keep) const {
    return submit_ && submit_.get() != Py_None && !is_tensors(keep);
  }

  // Writes the number at the end of a text; nobody asks whose content it is.
  bool append_number(PyObject* tensor, PyObject* form, PyObject* role, PyObject* label,
                     PyObject* keep, std::string& text) {
    Ref number = Ref::steal(of(tensor, form, Py_None, role, label, keep));
    if (!number) return false;
    const long long value = PyLong_AsLongLong(number.get());
    if (value == -1 && PyErr_Occurred()) return false;
    text += std::to_string(value);
    return true;
  }

  PyObject* of_plain(PyObject* tensor, PyObject* form, PyObject* call, PyObject* role,
                     PyObject* label, PyObject* keep) {
    if (writes_.any()) forget_written();
    const View view = view_of(*tensor_in(tensor).unsafeGetTensorImpl(), form);
    auto found = numbers_.find(view);
    if (found != numbers_.end()) return PyLong_FromLongLong(found->second);
    Ref number = submit_.get() != Py_None && !is_tensors(keep)
                     ? submitted(tensor, form)
                     : made(tensor, form, call, role, label, keep);
    if (!number) return nullptr;
    const long long value = PyLong_AsLongLong(number.get());
    if (value == -1 && PyErr_Occurred()) return nullptr;
    numbers_[view] = value;
    return number.release();
  }

  // The content of this storage was changed by something that moves no version.
  PyObject* forget(PyObject* object) {
    TORCH_CHECK(make_, APART);
    if (!is_tensor(object)) return PyObject_CallOneArg(forget_.get(), object);
    const at::TensorImpl& tensor = *tensor_in(object).unsafeGetTensorImpl();
    auto found = storages_.find(tensor.unsafe_storage().unsafeGetStorageImpl());
    if (found != storages_.end()) found->second.mark = 0;
    if (!is_plain(tensor)) return PyObject_CallOneArg(forget_.get(), object);
    Py_RETURN_NONE;
  }

  // Numbers come from `ids` from now on, and nothing is known.
  void begin(PyObject* ids) {
    ids_ = Ref::borrow(ids);
    numbers_.clear();
    storages_.clear();
  }

  int traverse(visitproc visit, void* arg) const {
    for (const Ref* ref : {&otherwise_, &forget_, &make_, &submit_, &value_, &marks_}) {
      if (int stop = ref->visit(visit, arg)) return stop;
    }
    return 0;
  }
  void let_go() { otherwise_ = forget_ = make_ = submit_ = value_ = marks_ = Ref(); }

 private:
  void forget_written() {
    for (const c10::StorageImpl* storage : writes_.take()) {
      auto found = storages_.find(const_cast<c10::StorageImpl*>(storage));
      if (found != storages_.end()) found->second.mark = 0;
      if (!marks_ || !PyDict_GET_SIZE(marks_.get())) continue;
      const Ref key = must(PyLong_FromVoidPtr(const_cast<c10::StorageImpl*>(storage)));
      if (PyDict_DelItem(marks_.get(), key.get()) < 0) PyErr_Clear();
    }
  }

  static bool is_tensors(PyObject* keep) {
    return PyUnicode_CompareWithASCIIString(keep, "tensors") == 0;
  }

  Ref made(PyObject* tensor, PyObject* form, PyObject* call, PyObject* role, PyObject* label,
           PyObject* keep) {
    Ref name = Ref::steal(PyTuple_Pack(3, call, role, label));
    if (!name) return Ref();
    PyObject* arguments[] = {tensor, name.get(), is_tensors(keep) ? Py_True : Py_False, form};
    return Ref::steal(PyObject_Vectorcall(make_.get(), arguments, 4, nullptr));
  }

  Ref submitted(PyObject* tensor, PyObject* form) {
    TORCH_CHECK(ids_, "no step has begun");
    Ref number = Ref::steal(PyIter_Next(ids_.get()));
    if (!number) throw python_error();
    PyObject* content[] = {tensor, form};
    Ref result = Ref::steal(PyObject_Vectorcall(submit_.get(), content, 2, nullptr));
    if (!result) return Ref();
    PyObject* line[] = {number.get(), result.get()};
    Ref done = Ref::steal(PyObject_Vectorcall(value_.get(), line, 2, nullptr));
    return done ? number : Ref();
  }

  // While there is a weak reference no other storage takes a storage's place in memory.
  struct Storage {
    c10::weak_intrusive_ptr<c10::StorageImpl> held;
    uint64_t mark = 0;  // 0: nothing is known of it
  };

  View view_of(const at::TensorImpl& tensor, PyObject* form) {
    const auto& storage = tensor.unsafe_storage();
    auto* address = storage.unsafeGetStorageImpl();
    auto found = storages_.find(address);
    if (found == storages_.end()) {
      found = storages_.emplace(address, Storage{storage.getWeakStorageImpl()}).first;
    }
    if (!found->second.mark) found->second.mark = next_mark_++;
    const long long number = PyLong_AsLongLong(form);
    if (number == -1 && PyErr_Occurred()) throw python_error();
    return {found->second.mark, tensor.version_counter().current_version(),
            tensor.storage_offset(), number};
  }

  Ref otherwise_, forget_, make_, submit_, value_, marks_, ids_;
  Writes writes_;
  std::unordered_map<c10::StorageImpl*, Storage> storages_;
  std::unordered_map<View, long long, HashView> numbers_;
  uint64_t next_mark_ = 1;
};

}  // namespace tensorprobe
