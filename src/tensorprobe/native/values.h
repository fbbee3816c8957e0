// Contents that have a number: what `record.values.Values` does of plain tensors.
#pragma once

#include <string>
#include <unordered_map>

#include <ATen/EmptyTensor.h>

#include "asking.h"
#include "writes.h"

namespace tensorprobe {

// What tells one content from another, as in record/values.py.
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
  // storages of other tensors, `lent` gives the number of a content that others may write to.
  Contents(Ref otherwise, Ref forget, Ref make, Ref submit, Ref value, Ref marks, Ref lent)
      : otherwise_(std::move(otherwise)),
        forget_(std::move(forget)),
        make_(std::move(make)),
        submit_(std::move(submit)),
        value_(std::move(value)),
        marks_(std::move(marks)),
        lent_(std::move(lent)) {}

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
    const at::TensorImpl& impl = *tensor_in(tensor).unsafeGetTensorImpl();
    const View view = view_of(impl, form);
    auto found = numbers_.find(view);
    const bool is_known = found != numbers_.end();
    const bool is_lent = others_may_write(*impl.unsafe_storage().unsafeGetStorageImpl());
    if (is_known && !is_lent) return PyLong_FromLongLong(found->second);
    Ref number;
    if (is_lent) {
      const Ref known = must(is_known ? PyLong_FromLongLong(found->second) : Py_NewRef(Py_None));
      PyObject* arguments[] = {tensor, known.get(), form, call, role, label, keep};
      number = Ref::steal(PyObject_Vectorcall(lent_.get(), arguments, 7, nullptr));
    } else if (submit_.get() != Py_None && !is_tensors(keep) && !may_be_of_outside(role)) {
      number = submitted(tensor, form);
    } else {
      number = made(tensor, form, call, role, label, keep);
    }
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

  // The program has lent the memory of this tensor to something that is not torch.
  PyObject* lend(PyObject* object) {
    TORCH_CHECK(make_, APART);
    if (is_tensor(object) && is_plain(*tensor_in(object).unsafeGetTensorImpl())) {
      const auto& storage = tensor_in(object).unsafeGetTensorImpl()->unsafe_storage();
      seen_lent_.emplace(storage.unsafeGetStorageImpl(), storage.getWeakStorageImpl());
    }
    Py_RETURN_NONE;
  }

  // A collective writes to the memory of this plain tensor, or has written to it.
  void hold(PyObject* object, bool on) {
    const auto& storage = tensor_in(object).unsafeGetTensorImpl()->unsafe_storage();
    if (on) {
      in_flight_.emplace(storage.unsafeGetStorageImpl(), storage.getWeakStorageImpl());
    } else {
      in_flight_.erase(storage.unsafeGetStorageImpl());
    }
  }

  // Numbers come from `ids` from now on, and nothing is known.
  void begin(PyObject* ids) {
    ids_ = Ref::borrow(ids);
    numbers_.clear();
    storages_.clear();
    std::erase_if(seen_lent_, [](const auto& each) { return each.second.expired(); });
  }

  int traverse(visitproc visit, void* arg) const {
    for (const Ref* ref : {&otherwise_, &forget_, &make_, &submit_, &value_, &marks_, &lent_}) {
      if (int stop = ref->visit(visit, arg)) return stop;
    }
    return 0;
  }
  void let_go() { otherwise_ = forget_ = make_ = submit_ = value_ = marks_ = lent_ = Ref(); }

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

  // Whether numpy, say, has this memory. What numpy is given, or gives, cannot be resized any more.
  // Nor can what was read or mapped from a file, which nobody else writes to: weights are such.
  bool others_may_write(const c10::StorageImpl& storage) const {
    if (!seen_lent_.empty() && seen_lent_.count(&storage)) return true;
    if (!in_flight_.empty() && in_flight_.count(&storage)) return true;
    if (storage.resizable()) return false;
    if (storage.allocator() != nullptr || !storage.device().is_cpu()) return true;
    static const c10::DeleterFnPtr of_others =
        c10::InefficientStdFunctionContext::makeDataPtr(nullptr, [](void*) {}, c10::kCPU)
            .get_deleter();
    return storage.data_ptr().get_deleter() == of_others;
  }

  static bool is_tensors(PyObject* keep) {
    return PyUnicode_CompareWithASCIIString(keep, "tensors") == 0;
  }

  // As `Values._came_from_outside`, which knows better, of the role alone.
  static bool may_be_of_outside(PyObject* role) {
    return PyUnicode_CompareWithASCIIString(role, "output") != 0;
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
    PyObject* content[] = {tensor, form, is_there(tensor_in(tensor)) ? Py_True : Py_False};
    Ref result = Ref::steal(PyObject_Vectorcall(submit_.get(), content, 3, nullptr));
    if (!result) return Ref();
    PyObject* line[] = {number.get(), result.get()};
    Ref done = Ref::steal(PyObject_Vectorcall(value_.get(), line, 2, nullptr));
    return done ? number : Ref();
  }

  // As `tensors.memory.is_there`, of a plain tensor.
  static bool is_there(const at::Tensor& tensor) {
    const auto nbytes = at::detail::computeStorageNbytes(
        tensor.sizes(), tensor.strides(), tensor.element_size(), tensor.storage_offset());
    return tensor.unsafeGetTensorImpl()->unsafe_storage().nbytes() >= nbytes;
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

  Ref otherwise_, forget_, make_, submit_, value_, marks_, lent_, ids_;
  Writes writes_;
  std::unordered_map<c10::StorageImpl*, Storage> storages_;
  // those that `lend` and `hold` were told of; weakly held, as those above
  using Held = std::unordered_map<const c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>>;
  Held seen_lent_, in_flight_;
  std::unordered_map<View, long long, HashView> numbers_;
  uint64_t next_mark_ = 1;
};

}  // namespace tensorprobe
