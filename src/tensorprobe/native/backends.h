// Starting kernels on tensors: what `numerics.backends.KernelBackend.start` does of known forms.
#pragma once

#include <unordered_map>
#include <vector>

#include "asking.h"

namespace tensorprobe {

class Starter {
 public:
  // `otherwise` starts on a tensor of a form that is not known here, and may `know` it then.
  // `usual_stream` is a function, as `Port.usual_stream`; or what CUDA's asks: the device's number,
  // and functions for the current device, its current stream, and whether that is captured.
  Starter(Ref queue, Ref usual_stream, Ref new_result, Ref otherwise, Py_ssize_t slots,
          int64_t rows)
      : queue_(std::move(queue)),
        usual_stream_(std::move(usual_stream)),
        new_result_(std::move(new_result)),
        otherwise_(std::move(otherwise)),
        slots_(slots),
        rows_(rows) {}

  // How a kernel starts: `call(programs, 1, 1, stream, *before, *given, *after)`, where text in
  // `given` names what differs from one tensor to the next; `ticket` is what follows the result.
  bool know(PyObject* form, int64_t programs, PyObject* call, PyObject* before, PyObject* given,
            PyObject* after, PyObject* units, PyObject* ticket) {
    Plan plan;
    plan.programs = programs;
    plan.call = Ref::borrow(call);
    plan.units = Ref::borrow(units);
    plan.ticket = Ref::borrow(ticket);
    Ref count = Ref::steal(PyLong_FromLongLong(programs));
    Ref one = Ref::steal(PyLong_FromLong(1));
    if (!count || !one) return false;
    plan.arguments = {{VALUE, count}, {VALUE, one}, {VALUE, one}, {STREAM, {}}};
    for (PyObject* part : {before, given, after}) {
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(part); ++i) {
        PyObject* item = PyTuple_GET_ITEM(part, i);
        Kind kind = VALUE;
        if (part == given && PyUnicode_Check(item) && !kind_of(item, kind)) return false;
        plan.arguments.push_back({kind, kind == VALUE ? Ref::borrow(item) : Ref()});
      }
    }
    const int64_t number = PyLong_AsLongLong(form);
    if (number == -1 && PyErr_Occurred()) return false;
    plans_[number] = std::make_shared<const Plan>(std::move(plan));
    return true;
  }

  void forget() { plans_.clear(); }

  // The result that is to come; None where the tensor needs a closer look.
  PyObject* start(PyObject* tensor, PyObject* form) {
    TORCH_CHECK(queue_, APART);
    std::shared_ptr<const Plan> plan;  // held: Python may come back here meanwhile
    if (PyLong_Check(form)) {
      auto found = plans_.find(PyLong_AsLongLong(form));
      if (found != plans_.end()) plan = found->second;
    }
    if (!plan) return otherwise(tensor, form);
    const at::TensorImpl& impl = *tensor_in(tensor).unsafeGetTensorImpl();
    if (!is_plain(impl) || !impl.unsafe_storage().nbytes()) return otherwise(tensor, form);
    const auto address = reinterpret_cast<uintptr_t>(impl.data());
    Ref stream = usual_stream();
    if (!stream) return nullptr;
    if (stream.get() == Py_None || !address || address & 15) Py_RETURN_NONE;
    Ref result = Ref::steal(PyObject_CallNoArgs(new_result_.get()));
    Ref held = Ref::steal(PyObject_CallMethodNoArgs(queue_.get(), word<"acquire">()));
    if (!result || !held) return nullptr;
    const bool started = launch(*plan, address, stream.get(), result.get());
    // What failed fails again there, and is known for it then. Not of a signal's handler.
    if (!started && !PyErr_ExceptionMatches(PyExc_Exception)) return release_and_raise();
    PyErr_Clear();
    Ref released = Ref::steal(PyObject_CallMethodNoArgs(queue_.get(), word<"release">()));
    if (!released) return nullptr;
    return started ? result.release() : otherwise(tensor, form);
  }

  int traverse(visitproc visit, void* arg) const {
    for (const Ref* ref : {&queue_, &usual_stream_, &otherwise_}) {
      if (int stop = ref->visit(visit, arg)) return stop;
    }
    return 0;
  }
  void let_go() {
    plans_.clear();
    queue_ = usual_stream_ = otherwise_ = Ref();
  }

 private:
  enum Kind { VALUE, STREAM, ADDRESS, UNITS, ROWS_AT, META_AT, DIGESTS_AT, ROW, SLOT };

  struct Argument {
    Kind kind;
    Ref value;
  };

  struct Plan {
    int64_t programs;
    Ref call, units, ticket;
    std::vector<Argument> arguments;
  };

  static bool kind_of(PyObject* text, Kind& kind) {
    static const std::pair<const char*, Kind> kinds[] = {
        {"address", ADDRESS}, {"units", UNITS}, {"rows_at", ROWS_AT}, {"meta_at", META_AT},
        {"digests_at", DIGESTS_AT}, {"row", ROW}, {"slot", SLOT}};
    for (auto [word, found] : kinds) {
      if (PyUnicode_CompareWithASCIIString(text, word) == 0) {
        kind = found;
        return true;
      }
    }
    PyErr_Format(PyExc_ValueError, "no argument of a kernel is called %R", text);
    return false;
  }

  // None where something is in the way.
  Ref usual_stream() const {
    if (!PyTuple_CheckExact(usual_stream_.get())) {
      return Ref::steal(PyObject_CallNoArgs(usual_stream_.get()));
    }
    PyObject* const* asks = &PyTuple_GET_ITEM(usual_stream_.get(), 0);
    Ref current = Ref::steal(PyObject_CallNoArgs(asks[1]));
    if (!current) return Ref();
    const int here = PyObject_RichCompareBool(current.get(), asks[0], Py_EQ);
    if (here <= 0) return here < 0 ? Ref() : Ref::borrow(Py_None);
    Ref stream = Ref::steal(PyObject_CallOneArg(asks[2], asks[0]));
    if (!stream) return Ref();
    const int is_own = PyObject_IsTrue(stream.get());  // CUDA captures no graph on stream 0
    if (is_own <= 0) return is_own < 0 ? Ref() : stream;
    Ref captured = Ref::steal(PyObject_CallNoArgs(asks[3]));
    if (!captured) return Ref();
    return captured.get() == Py_False ? stream : Ref::borrow(Py_None);
  }

  PyObject* release_and_raise() {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    Ref::steal(PyObject_CallMethodNoArgs(queue_.get(), word<"release">()));
    PyErr_Restore(type, value, trace);
    return nullptr;
  }

  PyObject* otherwise(PyObject* tensor, PyObject* form) {
    PyObject* arguments[] = {tensor, form};
    return PyObject_Vectorcall(otherwise_.get(), arguments, 2, nullptr);
  }

  // A place in the bank that is being filled, as `Queue.place`, which makes room where none is.
  bool place(const Plan& plan, PyObject* stream, Ref& bank, Ref& tickets, Py_ssize_t& slot,
             int64_t& row) {
    bank = Ref::steal(PyObject_GetAttr(queue_.get(), word<"_filling">()));
    if (!bank) return false;
    if (bank.get() != Py_None) {
      tickets = Ref::steal(PyObject_GetAttr(bank.get(), word<"tickets">()));
      Ref used = Ref::steal(PyObject_GetAttr(bank.get(), word<"used_rows">()));
      Ref streams = Ref::steal(PyObject_GetAttr(bank.get(), word<"streams">()));
      if (!tickets || !used || !streams) return false;
      slot = PyList_GET_SIZE(tickets.get());
      row = PyLong_AsLongLong(used.get());
      const int known = PyDict_Contains(streams.get(), stream);
      if (known < 0) return false;
      if (known && slot < slots_ && row + plan.programs <= rows_) {
        Ref after = Ref::steal(PyLong_FromLongLong(row + plan.programs));
        return after && PyList_Append(tickets.get(), Py_None) == 0 &&
               PyObject_SetAttr(bank.get(), word<"used_rows">(), after.get()) == 0;
      }
    }
    Ref wanted = Ref::steal(PyLong_FromLongLong(plan.programs));
    if (!wanted) return false;
    Ref found = Ref::steal(PyObject_CallMethodObjArgs(queue_.get(), word<"place">(), wanted.get(),
                                                      stream, nullptr));
    if (!found) return false;
    bank = Ref::borrow(PyTuple_GetItem(found.get(), 0));
    slot = PyLong_AsSsize_t(PyTuple_GetItem(found.get(), 1));
    row = PyLong_AsLongLong(PyTuple_GetItem(found.get(), 2));
    if (PyErr_Occurred()) return false;
    tickets = Ref::steal(PyObject_GetAttr(bank.get(), word<"tickets">()));
    return static_cast<bool>(tickets);
  }

  bool launch(const Plan& plan, uintptr_t address, PyObject* stream, PyObject* result) {
    Ref bank, tickets;
    Py_ssize_t slot = 0;
    int64_t row = 0;
    if (!place(plan, stream, bank, tickets, slot, row)) return false;
    std::vector<Ref> made;
    std::vector<PyObject*> arguments;
    made.reserve(8);
    arguments.reserve(plan.arguments.size());
    auto add = [&](PyObject* fresh) {
      made.push_back(Ref::steal(fresh));
      return fresh;
    };
    for (const Argument& argument : plan.arguments) {
      PyObject* value = nullptr;
      switch (argument.kind) {
        case VALUE: value = argument.value.get(); break;
        case STREAM: value = stream; break;
        case UNITS: value = plan.units.get(); break;
        case ADDRESS: value = add(PyLong_FromUnsignedLongLong(address)); break;
        case ROW: value = add(PyLong_FromLongLong(row)); break;
        case SLOT: value = add(PyLong_FromSsize_t(slot)); break;
        case ROWS_AT: value = add(PyObject_GetAttr(bank.get(), word<"rows_at">())); break;
        case META_AT: value = add(PyObject_GetAttr(bank.get(), word<"meta_at">())); break;
        case DIGESTS_AT: value = add(PyObject_GetAttr(bank.get(), word<"digests_at">())); break;
      }
      if (value == nullptr) return false;
      arguments.push_back(value);
    }
    Ref done = Ref::steal(
        PyObject_Vectorcall(plan.call.get(), arguments.data(), arguments.size(), nullptr));
    if (!done) return false;
    // Does not hold the tensor, which must go when the program lets it go.
    const Py_ssize_t parts = PyTuple_GET_SIZE(plan.ticket.get());
    PyObject* ticket = PyTuple_New(parts + 1);
    if (ticket == nullptr) return false;
    PyTuple_SET_ITEM(ticket, 0, Py_NewRef(result));
    for (Py_ssize_t i = 0; i < parts; ++i) {
      PyTuple_SET_ITEM(ticket, i + 1, Py_NewRef(PyTuple_GET_ITEM(plan.ticket.get(), i)));
    }
    return PyList_SetItem(tickets.get(), slot, ticket) == 0;
  }

  Ref queue_, usual_stream_, new_result_, otherwise_;
  Py_ssize_t slots_;
  int64_t rows_;
  std::unordered_map<int64_t, std::shared_ptr<const Plan>> plans_;
};

}  // namespace tensorprobe
