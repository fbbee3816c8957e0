// Calls under the overflow guard whose results are looked at later: what `overflow.every_call`,
// `overflow.device_calls` and `overflow.pending_calls` do of plain tensors among plain arguments.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/graph_task.h>

#include <array>
#include <cmath>
#include <unordered_map>
#include <unordered_set>

#include "gradients.h"
#include "stand_ins.h"
#include "module_place.h"

namespace tensorprobe {

// What the guard needs to know of a dtype: none where its numbers are all finite.
struct Numbers {
  Ref dtype, limit;
  double most = 0;
  bool is_real = false;
};

// Where the gradients are that a node sends to a call's inputs: `Spot`s of Python.
struct Spots {
  explicit Spots(PyObject* from) : list(Ref::borrow(from)) {
    const Ref items = must(PySequence_Tuple(from));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(items.get()); ++i) {
      PyObject* spot = PyTuple_GET_ITEM(items.get(), i);
      TORCH_CHECK(PyTuple_Check(spot) && PyTuple_GET_SIZE(spot) >= 2, "a spot is a tuple");
      const Py_ssize_t position = PyLong_AsSsize_t(PyTuple_GET_ITEM(spot, 0));
      if (position == -1 && PyErr_Occurred()) throw python_error();
      places.push_back({static_cast<size_t>(position), Ref::borrow(PyTuple_GET_ITEM(spot, 1))});
    }
  }

  struct Place {
    size_t position;
    Ref path;
  };
  Ref list;
  std::vector<Place> places;
};

// While it lives, tensors are read without a function mode or subclass taking notice: what Python
// is asked may read some.
struct ModesOff {
  using State = at::impl::PythonTorchFunctionTLS;
  ModesOff() { State::set_disabled_state(at::impl::ALL_DISABLED); }
  ~ModesOff() { State::set_disabled_state(before); }
  ModesOff(const ModesOff&) = delete;
  const at::impl::TorchFunctionDisabledState before = State::get_disabled_state();
};

class EveryCall;

// For hooks, which outlive the guard as long as the graph does. Read with the interpreter held.
struct Token {
  EveryCall* observer = nullptr;
  PyObject* box = nullptr;
};

class EveryCall {
 public:
  // `facts` are what Python's modules have as constants, by name.
  EveryCall(PyObject* mode, PyObject* observer, PyObject* plans, PyObject* stand_ins,
            PyObject* facts)
      : mode_(Ref::borrow(mode)), observer_(Ref::borrow(observer)), plans_(Ref::borrow(plans)) {
    state_ = attribute<"state">(observer_);
    backward_ = attribute<"backward">(observer_);
    device_ = attribute<"device">(observer_);
    pending_ = attribute<"pending">(state_);
    known_ = attribute<"_known">(pending_);
    const Ref program = attribute<"program">(state_);
    counter_ = attribute<"counter">(program);
    place_ = attribute<"place">(program);
    watcher_ = attribute<"watcher">(state_);
    on_host_ = is_set<"looks_later">(state_);
    is_late_ = is_set<"is_late">(state_);
    const Ref every = attribute<"look_every">(state_);
    look_every_ = every.get() == Py_None ? -1 : PyLong_AsSsize_t(every.get());
    casts_ = fact(facts, "casts");
    moves_ = fact(facts, "moves");
    passes_ = fact(facts, "passes");
    scales_ = fact(facts, "scales");
    nowhere_ = fact(facts, "nowhere");
    linear_ = fact(facts, "linear");
    getframe_ = fact(facts, "getframe");
    stand_ins_ = StandIns(Ref::borrow(stand_ins), fact(facts, "handler"));
    modules_ = fact(facts, "modules");
    compiler_ = fact(facts, "compiler");
    send_later_ = fact(facts, "send_later");
    positions_ = fact(facts, "positions");
    atoms_ = fact(facts, "atoms");
    copied_ = PyLong_AsLong(fact(facts, "copied").get());
    passing_ = fact(facts, "passing");
    TORCH_CHECK(PyList_Check(positions_.get()) && PyAnySet_Check(atoms_.get()) &&
                    PyDict_Check(modules_.get()) && PyDict_Check(compiler_.get()) &&
                    PyDict_Check(passing_.get()),
                "constants of another kind");
    fields_.read(fact(facts, "fields").get());
    read_limits(fact(facts, "limits").get());
    most_arguments_ = std::min<Py_ssize_t>(60, PyList_GET_SIZE(positions_.get()));
  }

  ~EveryCall() { token_->observer = nullptr; }

  void belong_to(PyObject* box) { *token_ = {this, box}; }

  // Make a call of the program, as `CallMode.__torch_function__`; `mode` where Python has to.
  PyObject* call(PyObject* mode, PyObject* func, PyObject* args, PyObject* kwargs) {
    if (kwargs == Py_None) kwargs = nullptr;
    if (!observer_ || StandIns::is_tracing() || !PyTuple_CheckExact(args)) return Py_NewRef(mode);
    if (kwargs != nullptr && !PyDict_CheckExact(kwargs)) return Py_NewRef(mode);
    const Ref plan = Ref::borrow(PyDict_GetItemWithError(plans_.get(), func));
    if (!plan) {  // not met before, or it cannot be looked up
      if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) return nullptr;
      PyErr_Clear();
      return Py_NewRef(mode);
    }
    if (plan.get() == Py_False) return PyObject_Call(func, args, kwargs);
    if (plan.get() == Py_None) return stand_ins_.make(func, args, kwargs);
    const Ref state = state_;  // held: Python may come back here meanwhile
    if (!is_set<"on">(state)) return stand_ins_.make(func, args, kwargs);
    if (fields_.is(plan, fields_.is_operator) || may_be_others()) return Py_NewRef(mode);
    const Ref stepping = attribute<"stepping">(state);
    const Ref closures = attribute<"closures">(state);
    if (!PyDict_Check(stepping.get()) || !PyDict_Check(closures.get())) return Py_NewRef(mode);
    if (PyDict_GET_SIZE(closures.get()) != 0) return Py_NewRef(mode);  // whose call is it?
    bool is_stepping = false;
    if (PyDict_GET_SIZE(stepping.get()) != 0) {
      const Ref ident = must(PyLong_FromUnsignedLong(PyThread_get_thread_ident()));
      is_stepping = PyDict_Contains(stepping.get(), ident.get()) == 1;
    }
    bool passes = false;
    if (!is_stepping) {
      const bool is_special = fields_.is(plan, fields_.is_special);
      PyObject* kind = fields_.of(plan, fields_.kind);
      passes = kind == passes_.get();
      if (is_special && !passes) {
        if (kind == scales_.get() || fields_.is(plan, fields_.uninitialised)) {
          return Py_NewRef(mode);
        }
        const Ref number = next_number(plan);
        return stand_ins_.make(func, args, kwargs);
      }
      if (!passes && !is_short(plan, kwargs)) return Py_NewRef(mode);
      if (!is_late_ || !is_set<"active">(pending_)) return Py_NewRef(mode);
    }
    const Ref number = next_number(plan);
    if (is_stepping) return stand_ins_.make(func, args, kwargs);
    const uint64_t start = at::sequence_number::peek();
    Ref result = Ref::steal(stand_ins_.make(func, args, kwargs));
    if (!result) return nullptr;
    const Call made{plan, number, start, args, kwargs, result};
    const bool is_well =
        protect([&] { passes ? note_view(made) : note(made); },
                [&](PyObject* error) {
                  const Ref stem = Ref::borrow(fields_.of(plan, fields_.stem));
                  method<"trouble">(watcher_, stem.get(), error);
                });
    if (!is_well) return nullptr;
    if (is_set<"attention">(watcher_)) method<"call_made">(watcher_);
    return result.release();
  }

  // As `PendingCalls.hold_plain`.
  PyObject* hold_plain(PyObject* object, PyObject* path) {
    TORCH_CHECK(observer_, APART);
    if (!is_own_type(object) || !has_numbers(*tensor_in(object).unsafeGetTensorImpl())) {
      return method<"hold_piecemeal">(pending_, object, path).release();
    }
    return hold(tensor_in(object), object, path, true).release();
  }

  // Backward leaves a call, as `send_later`.
  void outgoing(const Ref& call, const Spots& spots, long passing, const variable_list& grads,
                const variable_list& incoming) {
    if (!observer_) return;
    const Ref state = state_, backward = backward_;
    if (!is_set<"on">(state)) return;
    const bool is_well = protect([&] { gradients(call, spots, passing, grads, incoming); },
                                 [&](PyObject* error) {
                                   method<"backward_trouble">(backward, call.get(), error);
                                 });
    if (!is_well) throw python_error();
  }

  // The same as a hook of Python.
  Ref python_hook(const Ref& call, const Spots& spots, long passing) const {
    TORCH_CHECK(observer_, APART);
    const Ref number = whole_number(passing);
    return method<"hook_for">(backward_, call.get(), spots.list.get(), number.get());
  }

  int traverse(visitproc visit, void* arg) const {
    for (const Ref* ref : {&mode_, &observer_, &state_, &backward_, &device_, &pending_, &known_,
                           &counter_, &place_, &watcher_, &plans_, &send_later_}) {
      if (int stop = ref->visit(visit, arg)) return stop;
    }
    return stand_ins_.traverse(visit, arg);
  }
  void let_go() {
    stand_ins_.let_go();
    mode_ = observer_ = state_ = backward_ = device_ = pending_ = known_ = Ref();
    counter_ = place_ = watcher_ = plans_ = send_later_ = Ref();
  }

 private:
  // A call that has returned.
  struct Call {
    const Ref& plan;
    const Ref& number;
    uint64_t start;  // the number of the next graph node before it
    PyObject* args;
    PyObject* kwargs;
    const Ref& result;

    // Never null.
    Ref keywords() const { return kwargs ? Ref::borrow(kwargs) : must(PyDict_New()); }
  };

  struct Input {
    Ref object;  // held: a list may change meanwhile
    Ref path;
  };

  // The tensors among the arguments of a call, and which of them need a gradient.
  struct Given {
    std::vector<Input> inputs;
    uint64_t needs = 0;  // a bit for each position
    // where there are some in a list or by a keyword, all of them in a row; `\x7f` where one of
    // them is there twice, or there are many
    std::string which;
    bool has_lists = false, has_names = false;
  };

  // Where things are in a `Plan`.
  struct Fields {
    Py_ssize_t api, kind, uninitialised, is_special, is_short, may_write, is_operator, stem;

    void read(PyObject* names) {
      const std::pair<const char*, Py_ssize_t*> all[] = {
          {"api", &api},           {"kind", &kind},           {"uninitialised", &uninitialised},
          {"is_special", &is_special}, {"is_short", &is_short}, {"may_write", &may_write},
          {"is_operator", &is_operator}, {"stem", &stem}};
      for (auto [name, place] : all) {
        const Ref text = must(PyUnicode_FromString(name));
        *place = PySequence_Index(names, text.get());
        if (*place < 0) throw python_error();
      }
    }
    static PyObject* of(const Ref& plan, Py_ssize_t place) {
      return PyTuple_GET_ITEM(plan.get(), place);
    }
    static bool is(const Ref& plan, Py_ssize_t place) { return of(plan, place) == Py_True; }
  };

  static Ref fact(PyObject* facts, const char* name) {
    Ref found = Ref::borrow(PyDict_GetItemString(facts, name));
    TORCH_CHECK(found, "no constant is called ", name);
    return found;
  }

  void read_limits(PyObject* limits) {
    TORCH_CHECK(PyDict_Check(limits), "limits come as a dict");
    PyObject *dtype, *limit;
    for (Py_ssize_t at = 0; PyDict_Next(limits, &at, &dtype, &limit);) {
      TORCH_CHECK(THPDtype_Check(dtype), "limits of dtypes");
      const auto type = reinterpret_cast<THPDtype*>(dtype)->scalar_type;
      const bool is_real = !c10::isComplexType(type);
      numbers_.at(static_cast<size_t>(type)) = {Ref::borrow(dtype), Ref::borrow(limit),
                                                PyFloat_AsDouble(limit), is_real};
    }
    if (PyErr_Occurred()) throw python_error();
  }

  // Does it; what fails is told as of `except Exception`. False: another error is set.
  template <typename Body, typename Tell>
  bool protect(Body body, Tell tell) {
    try {
      const ModesOff off;
      body();
      return true;
    } catch (python_error& error) {
      error.restore();
    } catch (const std::exception& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return false;
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    const Ref held[] = {Ref::steal(type), Ref::steal(value), Ref::steal(trace)};
    tell(held[1].get());
    return true;
  }

  // Whether it may be that a tool, a simulated device or a compiled part makes this call, or that
  // torch.func is at work.
  bool may_be_others() const {
    const Ref depth = attribute<"dispatch_depth">(mode_);
    const int in_backward = PyObject_IsTrue(depth.get());
    if (in_backward) return true;
    if (PyDict_GetItemWithError(compiler_.get(), word<"_is_compiling_flag">()) != Py_False) {
      return true;
    }
    PyObject* dynamo = PyDict_GetItemWithError(modules_.get(), literal<"torch._dynamo.convert_frame">());
    if (dynamo != nullptr) {
      const Ref held = Ref::steal(PyObject_GenericGetDict(dynamo, nullptr));
      PyObject* frames =
          held ? PyDict_GetItemWithError(held.get(), literal<"FRAME_COUNTER">()) : nullptr;
      // none while another thread imports it
      if (frames != nullptr && PyObject_IsTrue(frames)) return true;
    }
    if (PyErr_Occurred()) {  // Python says what to make of it
      PyErr_Clear();
      return true;
    }
    return c10::impl::tls_is_dispatch_key_included(
        c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
  }

  bool is_short(const Ref& plan, PyObject* kwargs) const {
    if (fields_.is(plan, fields_.is_short)) return true;
    if (!fields_.is(plan, fields_.may_write) || kwargs == nullptr) return false;
    return PyDict_GetItemWithError(kwargs, literal<"inplace">()) == Py_False;
  }

  // As `Counter.next`.
  Ref next_number(const Ref& plan) const {
    const Ref by_api = attribute<"_by_api">(counter_);
    PyObject* api = fields_.of(plan, fields_.api);
    PyObject* known =
        PyDict_Check(by_api.get()) ? PyDict_GetItemWithError(by_api.get(), api) : nullptr;
    if (known != nullptr && PyTuple_CheckExact(known)) {
      const Ref count = Ref::borrow(PyTuple_GET_ITEM(known, 0));
      return must(PyIter_Next(count.get()));
    }
    return method<"next">(counter_, api);
  }

  const Numbers& numbers_of(const at::TensorImpl& tensor) const {
    return numbers_[static_cast<size_t>(c10::typeMetaToScalarType(tensor.dtype()))];
  }

  // As `piece_of`, where it is something.
  bool has_numbers(const at::TensorImpl& tensor) const {
    return is_plain(tensor) && numbers_of(tensor).is_real && tensor.numel() &&
           tensor.unsafe_storage().nbytes() && tensor.data() != nullptr;
  }

  // -- Forward -------------------------------------------------------------------------------

  // As `_note_later`, and what is done where that will not do.
  void note(const Call& call) {
    Given given;
    PyObject* object = call.result.get();
    if (!is_plain_result(object) || !are_plain(call, given)) return note_otherwise(call);
    const std::vector<Input>& inputs = given.inputs;
    const at::Tensor& result = tensor_in(object);
    const at::TensorImpl& impl = *result.unsafeGetTensorImpl();
    const Numbers& numbers = numbers_of(impl);
    bool looked = static_cast<bool>(numbers.dtype), flag = true;
    PyObject* kind = fields_.of(call.plan, fields_.kind);
    if (kind == casts_.get() && !inputs.empty()) {
      const at::Tensor& source = tensor_in(inputs[0].object.get());
      const Numbers& before = numbers_of(*source.unsafeGetTensorImpl());
      if (inputs[0].object.get() == object || !before.dtype) {
        looked = false;
      } else if (looked) {
        flag = source.is_cpu() != result.is_cpu() || before.most > numbers.most;
      }
    } else if (kind == moves_.get() && looked) {
      looked = !result.is_view();
    }
    if (looked && !has_numbers(impl)) return note_otherwise(call);
    Ref noted;
    if (looked) {
      const Ref memory = memory_of(inputs);  // first: the result may share their memory
      const Ref held = hold(result, object, path_of(0), flag);
      noted = noted_call(call);
      const bool in_backward = torch::autograd::get_current_graph_task_id() != -1;
      add(noted.get(), literal<"forward">(), memory.get(), tuple_of(held.get()).get(), in_backward);
      look_if_due();
    }
    if (given.needs || given.has_lists || given.has_names) follow(call, result, given, noted);
  }

  void note_otherwise(const Call& call) {
    const Ref start = whole_number(call.start), keywords = call.keywords();
    method<"made_later">(observer_, call.plan.get(), call.number.get(), start.get(), call.args,
                         keywords.get(), callers_frame(getframe_).get(), call.result.get());
  }

  bool is_plain_result(PyObject* object) const {
    if (Py_TYPE(object) != reinterpret_cast<PyTypeObject*>(THPVariableClass)) return false;
    const at::Tensor& tensor = tensor_in(object);
    return (on_host_ || !tensor.is_cpu()) && is_plain(*tensor.unsafeGetTensorImpl());
  }

  PyObject* path_of(Py_ssize_t position) const {
    return PyList_GET_ITEM(positions_.get(), position);
  }

  // As `_plain_arguments`; False also where a number is not finite.
  bool are_plain(const Call& call, Given& given) const {
    const Py_ssize_t count = PyTuple_GET_SIZE(call.args);
    if (count > most_arguments_) return false;
    given.inputs.reserve(count);
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject* value = PyTuple_GET_ITEM(call.args, i);
      if (is_own_type(value)) {
        bool needs = false;
        if (!is_plain_input(value, needs)) return false;
        given.inputs.push_back({Ref::borrow(value), Ref::borrow(path_of(i))});
        if (needs) given.needs |= uint64_t{1} << i;
      } else if (PyList_CheckExact(value) || PyTuple_CheckExact(value)) {
        if (!is_plain_list(value, i, given)) return false;
      } else if (!is_finite_or_atom(value)) {
        return false;
      }
    }
    if (call.kwargs != nullptr) {
      PyObject *key, *value;
      for (Py_ssize_t at = 0; PyDict_Next(call.kwargs, &at, &key, &value);) {
        if (is_own_type(value)) {
          bool needs = false;
          if (!is_plain_input(value, needs)) return false;
          given.inputs.push_back({Ref::borrow(value), tuple_of(key)});
          given.has_names = given.has_names || needs;
        } else if (!is_finite_or_atom(value)) {
          return false;
        }
      }
    }
    if (given.has_lists || given.has_names) given.which = in_a_row(given.inputs);
    return true;
  }

  bool is_plain_input(PyObject* object, bool& needs) const {
    const at::Tensor& tensor = tensor_in(object);
    if (!is_plain(*tensor.unsafeGetTensorImpl())) return false;
    needs = tensor.requires_grad();
    if (!needs) return true;
    const NodePtr node = tensor.grad_fn();
    return !(node && is_function(*node)) && (on_host_ || !tensor.is_cpu());
  }

  bool is_plain_list(PyObject* list, Py_ssize_t position, Given& given) const {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(list); ++i) {
      PyObject* item = PySequence_Fast_GET_ITEM(list, i);
      if (is_own_type(item)) {
        bool needs = false;
        if (i >= PyList_GET_SIZE(positions_.get()) || !is_plain_input(item, needs)) return false;
        Ref path = tuple_of(PyTuple_GET_ITEM(path_of(position), 0), PyTuple_GET_ITEM(path_of(i), 0));
        given.inputs.push_back({Ref::borrow(item), std::move(path)});
        given.has_lists = given.has_lists || needs;
      } else if (!PyFloat_CheckExact(item) && !is_atom(item)) {
        return false;
      }
    }
    return true;
  }

  // As `_paths_of`.
  static std::string in_a_row(const std::vector<Input>& inputs) {
    const std::string unclear = "\x7f";
    if (inputs.size() > MOST_JOINED) return unclear;
    std::string row;
    for (size_t i = 0; i < inputs.size(); ++i) {
      for (size_t j = 0; j < i; ++j) {
        if (inputs[i].object.get() == inputs[j].object.get()) return unclear;
      }
      for (Py_ssize_t part = 0; part < PyTuple_GET_SIZE(inputs[i].path.get()); ++part) {
        const char* text = PyUnicode_AsUTF8(PyTuple_GET_ITEM(inputs[i].path.get(), part));
        if (text == nullptr) throw python_error();
        row.append(text).push_back('.');
      }
      row.push_back(tensor_in(inputs[i].object.get()).requires_grad() ? '!' : ' ');
    }
    return row;
  }

  bool is_atom(PyObject* value) const {  // it holds no tensor
    if (value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value)) return true;
    const int found = PySet_Contains(atoms_.get(), reinterpret_cast<PyObject*>(Py_TYPE(value)));
    if (found < 0) throw python_error();
    return found;
  }

  bool is_finite_or_atom(PyObject* value) const {
    return PyFloat_CheckExact(value) ? std::isfinite(PyFloat_AS_DOUBLE(value)) : is_atom(value);
  }

  // As `_is_noted_view`, and what is done where it is none.
  void note_view(const Call& call) {
    const Ref key = view_key(call);
    if (!key) {
      const Ref keywords = call.keywords();
      method<"passed">(observer_, call.plan.get(), call.number.get(), call.args, keywords.get(),
                       callers_frame(getframe_).get(), call.result.get());
      return;
    }
    const at::Tensor& result = tensor_in(call.result.get());
    const at::TensorImpl& impl = *result.unsafeGetTensorImpl();
    const Ref unflagged = whole_number(-1), shape = shape_of(impl);
    const Ref held = tuple_of(path_of(0), key.get(), device_of(result.device()).object.get(),
                              unflagged.get(), numbers_of(impl).dtype.get(), shape.get(), Py_False);
    const Ref given = tuple_of(path_of(0), key.get()), step = attribute<"step">(state_);
    const Ref noted = tuple_of(call.plan.get(), call.number.get(), literal<"">(), step.get(),
                               nowhere_.get());
    add(noted.get(), literal<"forward">(), tuple_of(given.get()).get(), tuple_of(held.get()).get(),
        false);
  }

  // The memory of the first argument, where its content is known and the result is a view of it.
  Ref view_key(const Call& call) const {
    PyObject* object = call.result.get();
    if (!PyTuple_GET_SIZE(call.args) || !is_own_type(object)) return Ref();
    PyObject* first = PyTuple_GET_ITEM(call.args, 0);
    if (!is_own_type(first)) return Ref();
    const at::Tensor &source = tensor_in(first), &result = tensor_in(object);
    const at::TensorImpl &before = *source.unsafeGetTensorImpl(),
                         &after = *result.unsafeGetTensorImpl();
    if (!has_numbers(after) || !is_plain(before) || before.dtype() != after.dtype()) return Ref();
    if (!on_host_ && (source.is_cpu() || result.is_cpu())) return Ref();
    auto* storage = before.unsafe_storage().unsafeGetStorageImpl();
    if (storage != after.unsafe_storage().unsafeGetStorageImpl()) return Ref();
    Ref key = must(PyLong_FromVoidPtr(storage));
    return is_known(versions(), key, before) ? key : Ref();
  }

  // Where the call was made, for a later report.
  Ref noted_call(const Call& call) const {
    const Ref here = attribute<"here">(place_);
    TORCH_CHECK(PyTuple_CheckExact(here.get()) && PyTuple_GET_SIZE(here.get()) == 3, "no place");
    const Ref trail =
        trail_from(callers_frame(getframe_), PyTuple_GET_ITEM(here.get(), 1), PyTuple_GET_ITEM(here.get(), 2));
    const Ref step = attribute<"step">(state_);
    return tuple_of(call.plan.get(), call.number.get(), PyTuple_GET_ITEM(here.get(), 0), step.get(),
                    trail.get());
  }

  // -- Pending calls --------------------------------------------------------------------------

  Ref versions() const {
    Ref found = attribute<"versions">(known_);
    TORCH_CHECK(PyDict_CheckExact(found.get()), "versions come as a dict");
    return found;
  }

  static bool is_known(const Ref& versions, const Ref& key, const at::TensorImpl& tensor) {
    PyObject* version = PyDict_GetItemWithError(versions.get(), key.get());
    if (version == nullptr) return false;
    return PyLong_AsLongLong(version) ==
           static_cast<int64_t>(tensor.version_counter().current_version());
  }

  static Ref shape_of(const at::TensorImpl& tensor) {
    const auto sizes = tensor.sizes();
    Ref shape = must(PyTuple_New(sizes.size()));
    for (size_t i = 0; i < sizes.size(); ++i) {
      PyTuple_SET_ITEM(shape.get(), i, whole_number(sizes[i]).release());
    }
    return shape;
  }

  // As `PendingCalls.inputs`.
  Ref memory_of(const std::vector<Input>& inputs) {
    const Ref known = versions();
    std::vector<Ref> found;
    found.reserve(inputs.size());
    for (const Input& input : inputs) {
      PyObject *object = input.object.get(), *path = input.path.get();
      const at::Tensor& tensor = tensor_in(object);
      const at::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
      if (!numbers_of(impl).dtype) continue;
      const Ref key = must(PyLong_FromVoidPtr(impl.unsafe_storage().unsafeGetStorageImpl()));
      if (!is_known(known, key, impl)) {
        if (!has_numbers(impl)) {
          const Ref item = tuple_of(object, path), list = tuple_of(item.get());
          const Ref more = method<"inputs">(pending_, list.get());
          for (Py_ssize_t i = 0; i < PyTuple_Size(more.get()); ++i) {
            found.push_back(Ref::borrow(PyTuple_GET_ITEM(more.get(), i)));
          }
          continue;
        }
        const Ref held = hold(tensor, object, path, true);
        add(Py_None, literal<"forward">(), must(PyTuple_New(0)).get(), tuple_of(held.get()).get(),
            false, false);
        if (nbytes_of(impl) < impl.unsafe_storage().nbytes()) {  // as `_doubt_rest`
          put(versions(), key, whole_number(-2));
        }
      }
      found.push_back(tuple_of(path, key.get()));
    }
    return tuple_from(found);
  }

  static Ref tuple_from(std::vector<Ref>& items) {
    Ref tuple = must(PyTuple_New(items.size()));
    for (size_t i = 0; i < items.size(); ++i) {
      PyTuple_SET_ITEM(tuple.get(), i, items[i].release());
    }
    return tuple;
  }

  static size_t nbytes_of(const at::TensorImpl& tensor) {
    return tensor.numel() * tensor.itemsize();
  }

  static void put(const Ref& dict, const Ref& key, const Ref& value) {
    if (PyDict_SetItem(dict.get(), key.get(), value.get()) < 0) throw python_error();
  }

  // As `PendingCalls.hold_piece`, of a tensor that `has_numbers`; `object` may be null.
  Ref hold(const at::Tensor& tensor, PyObject* object, PyObject* path, bool flag) {
    const at::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
    const Numbers& numbers = numbers_of(impl);
    Device& device = device_of(tensor.device());
    Ref ticket;
    if (flag) {
      if (!device.flags) look_for_flags(device);
      const int64_t count = device.starts ? count_of(impl) : 0;
      if (!count) {
        const Ref wrapped = wrap(tensor, object);
        return method<"hold_piecemeal">(pending_, wrapped.get(), path);
      }
      ticket = submit(device, tensor, object, numbers, count);
    } else {
      ticket = whole_number(-1);
    }
    auto* storage = impl.unsafe_storage().unsafeGetStorageImpl();
    const Ref key = must(PyLong_FromVoidPtr(storage)), known = versions();
    const Ref shape = shape_of(impl);
    // of memory that is new it makes no difference how much of it this is
    bool is_whole = true;
    if (PyDict_GetItemWithError(known.get(), key.get()) != nullptr) {
      is_whole = nbytes_of(impl) >= impl.unsafe_storage().nbytes();
    } else {
      c10::raw::intrusive_ptr::make_weak(storage);  // freed by `_Storages.clear`
    }
    put(known, key, whole_number(impl.version_counter().current_version()));
    return tuple_of(path, key.get(), device.object.get(), ticket.get(), numbers.dtype.get(),
                    shape.get(), is_whole ? Py_True : Py_False);
  }

  // How many numbers lie from its first on, in whatever order; 0 where there are holes.
  static int64_t count_of(const at::TensorImpl& tensor) {
    if (tensor.is_contiguous()) return tensor.numel();
    std::vector<std::pair<int64_t, int64_t>> steps;  // of what an expanded tensor repeats
    for (int64_t i = 0; i < tensor.dim(); ++i) {
      if (tensor.stride(i)) steps.emplace_back(tensor.stride(i), tensor.size(i));
    }
    std::sort(steps.begin(), steps.end());
    int64_t expected = 1;
    for (auto [step, length] : steps) {
      if (length == 1) continue;
      if (step != expected) return 0;
      expected *= length;
    }
    return expected;
  }

  static Ref wrap(const at::Tensor& tensor, PyObject* object) {
    return object != nullptr ? Ref::borrow(object) : must(THPVariable_Wrap(tensor));
  }

  // As `PendingCalls.add`.
  void add(PyObject* call, PyObject* direction, PyObject* inputs, PyObject* outputs,
           bool in_backward, bool counts = true) {
    static PyObject* const zero = PyLong_FromLong(0);
    const Ref notes = attribute<"_notes">(pending_);
    const Ref note = tuple_of(call, direction, inputs, outputs, zero,
                              in_backward ? Py_True : Py_False, literal<"">());
    if (PyList_Append(notes.get(), note.get()) < 0) throw python_error();
    if (counts && look_every_ >= 0 && PyList_GET_SIZE(notes.get()) >= look_every_) {
      set<"is_due">(pending_);
    }
  }

  void look_if_due() {
    if (is_set<"is_due">(pending_)) method<"look">(state_);
  }

  // -- Flags ---------------------------------------------------------------------------------

  // How the kernel starts on tensors of a dtype, as `Flagger` keeps it.
  struct Form {
    Ref call, before, after, table_at;
    int64_t tile;
  };

  struct Device {
    Ref object, flags;
    bool starts = false;  // kernels are started from here
    Ref flagger, index, current_device, current_stream, is_capturing, flags_at;
    int64_t slots = 0, most_programs = 0;
    std::unordered_map<int64_t, std::shared_ptr<const Form>> forms;
  };

  Device& device_of(const c10::Device& device) {
    const int64_t key = static_cast<int64_t>(device.type()) * 1000 + device.index();
    auto found = devices_.find(key);
    if (found == devices_.end()) {
      auto made = std::make_unique<Device>();
      made->object = must(THPDevice_New(device));
      found = devices_.emplace(key, std::move(made)).first;
    }
    return *found->second;  // which stays where it is
  }

  // The flags of a device, and what their kernels need, as `KernelFlags.parts` has it.
  void look_for_flags(Device& device) {
    const Ref flags = method<"flags_of">(pending_, device.object.get());
    const Ref parts = attribute<"parts">(flags);
    if (parts.get() != Py_None) {
      PyObject *flagger, *index, *current_device, *current_stream, *is_capturing, *flags_at;
      long long slots, most;
      if (!PyArg_ParseTuple(parts.get(), "OOOOOOLL", &flagger, &index, &current_device,
                            &current_stream, &is_capturing, &flags_at, &most, &slots)) {
        throw python_error();
      }
      device.flagger = Ref::borrow(flagger);
      device.index = Ref::borrow(index);
      device.current_device = Ref::borrow(current_device);
      device.current_stream = Ref::borrow(current_stream);
      device.is_capturing = Ref::borrow(is_capturing);
      device.flags_at = Ref::borrow(flags_at);
      device.slots = slots;
      device.most_programs = most;
      device.starts = true;
    }
    device.flags = flags;
  }

  // As `KernelFlags.submit_piece`, of `count` numbers.
  Ref submit(Device& device, const at::Tensor& tensor, PyObject* object, const Numbers& numbers,
             int64_t count) {
    const auto address = reinterpret_cast<uintptr_t>(tensor.unsafeGetTensorImpl()->data());
    Ref slot = must(PyIter_Next(attribute<"_slots">(device.flags).get()));
    const int64_t place = PyLong_AsLongLong(slot.get());
    const Ref past = attribute<"_past">(device.flags);
    if (place >= device.slots - 1 || PyObject_IsTrue(past.get())) {
      const Ref wrapped = wrap(tensor, object), number = whole_number(count),
                at = must(PyLong_FromUnsignedLongLong(address));
      Ref ticket = method<"submit_piece">(device.flags, wrapped.get(), numbers.dtype.get(),
                                          number.get(), at.get(), slot.get());
      if (is_set<"full">(device.flags)) set<"is_due">(pending_);
      return ticket;
    }
    const Ref limits = attribute<"_limits">(device.flags);
    if (PyList_SetItem(limits.get(), place, Py_NewRef(numbers.limit.get())) < 0) {
      throw python_error();
    }
    start(device, tensor, object, numbers, count, address, slot);
    return slot;
  }

  // As `Flagger.flag`.
  void start(Device& device, const at::Tensor& tensor, PyObject* object, const Numbers& numbers,
             int64_t count, uintptr_t address, const Ref& slot) {
    const bool is_aligned = !(address & 15), is_small = count < 2147483648;
    const auto key = static_cast<int64_t>(tensor.scalar_type()) * 4 + is_aligned * 2 + is_small;
    auto known = device.forms.find(key);
    const std::shared_ptr<const Form> form = known == device.forms.end() ? nullptr : known->second;
    const Ref number = whole_number(count), at = must(PyLong_FromUnsignedLongLong(address));
    const Ref stream = form ? usual_stream(device) : Ref();
    if (!stream) {
      const Ref wrapped = wrap(tensor, object);
      method<"flag">(device.flagger, wrapped.get(), numbers.dtype.get(), number.get(), at.get(),
                     slot.get());
      if (!form) learn_form(device, key, numbers, is_aligned, is_small);
      return;
    }
    static PyObject* const one = PyLong_FromLong(1);
    const int64_t wanted = (count + form->tile - 1) / form->tile;
    const Ref programs = whole_number(std::min(wanted, device.most_programs));
    std::vector<PyObject*> arguments;
    arguments.reserve(24);
    arguments.insert(arguments.end(), {programs.get(), one, one, stream.get()});
    auto extend = [&](const Ref& more) {
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(more.get()); ++i) {
        arguments.push_back(PyTuple_GET_ITEM(more.get(), i));
      }
    };
    extend(form->before);
    arguments.insert(arguments.end(), {at.get(), form->table_at.get(), device.flags_at.get(),
                                       number.get(), slot.get()});
    extend(form->after);
    must(PyObject_Vectorcall(form->call.get(), arguments.data(), arguments.size(), nullptr));
  }

  // The current stream; none where another device is in use, or a graph is captured.
  static Ref usual_stream(const Device& device) {
    const Ref current = must(PyObject_CallNoArgs(device.current_device.get()));
    const int is_here = PyObject_RichCompareBool(current.get(), device.index.get(), Py_EQ);
    if (is_here < 0) throw python_error();
    if (!is_here) return Ref();
    Ref stream = must(PyObject_CallOneArg(device.current_stream.get(), device.index.get()));
    const int is_own = PyObject_IsTrue(stream.get());  // CUDA captures no graph on stream 0
    if (is_own < 0) throw python_error();
    if (is_own && must(PyObject_CallNoArgs(device.is_capturing.get())).get() != Py_False) {
      return Ref();
    }
    return stream;
  }

  static void learn_form(Device& device, int64_t key, const Numbers& numbers, bool is_aligned,
                         bool is_small) {
    const Ref forms = attribute<"_forms">(device.flagger);
    const Ref name = tuple_of(numbers.dtype.get(), is_aligned ? Py_True : Py_False,
                              is_small ? Py_True : Py_False);
    const Ref found = Ref::borrow(PyDict_GetItemWithError(forms.get(), name.get()));
    if (!found) return;
    PyObject *call, *before, *after, *table_at;
    long long tile;
    if (!PyArg_ParseTuple(found.get(), "OO!O!LO", &call, &PyTuple_Type, &before, &PyTuple_Type,
                          &after, &tile, &table_at)) {
      throw python_error();
    }
    device.forms[key] = std::make_shared<const Form>(Form{
        Ref::borrow(call), Ref::borrow(before), Ref::borrow(after), Ref::borrow(table_at), tile});
  }

  // -- The graph -----------------------------------------------------------------------------

  static constexpr size_t MOST_JOINED = 16;  // lists that grow from call to call would fill a table

  // What tells how the nodes of a call hang together.
  struct Route {
    PyObject* plan;
    const std::type_info* node;
    uint64_t needs;     // a bit for each argument that needs a gradient
    uint64_t made;      // nodes
    std::string which;  // as in `Given`

    bool operator==(const Route& other) const {
      return plan == other.plan && node == other.node && needs == other.needs &&
             made == other.made && which == other.which;
    }
  };
  struct HashRoute {
    size_t operator()(const Route& route) const {
      const std::hash<const void*> hash;
      const size_t found =
          (hash(route.plan) * 31 + hash(route.node)) * 31 + route.needs * 7 + route.made;
      return route.which.empty() ? found : found * 31 + std::hash<std::string>()(route.which);
    }
  };

  // A node of a `Layout` of Python, and which arguments its spots are of.
  struct Below {
    size_t above, position;
    std::shared_ptr<const Spots> spots;
    std::vector<Py_ssize_t> arguments;
  };
  struct Known {
    Ref plan;  // held, for its address is the key
    std::vector<Below> nodes;
  };

  // The nodes that the call made, as the end of `_note_later`.
  void follow(const Call& call, const at::Tensor& result, const Given& given, Ref noted) {
    const NodePtr root = result.grad_fn();
    const uint64_t made = at::sequence_number::peek() - call.start;
    if (!root || !made) return;
    if (!noted) noted = noted_call(call);
    const Node& first = *root;
    const bool is_layer = made > 1 && given.which.empty() && is_linear(call);
    const Route route{call.plan.get(), &typeid(first), given.needs, made, given.which};
    if (made == 1 || is_layer) {
      auto found = routes_.find(route);
      if (found != routes_.end()) {
        std::vector<std::pair<NodePtr, std::shared_ptr<const Spots>>> ends;
        if (hangs_together(call, root, found->second->nodes, made == 1, ends)) {
          for (const auto& [node, spots] : ends) listen(node, noted, spots);
          return;
        }
      }
    }
    const Ref start = whole_number(call.start), keywords = call.keywords(),
              number = whole_number(made);
    const Ref learned =
        method<"new_route">(device_, call.plan.get(), call.number.get(), noted.get(), start.get(),
                            number.get(), call.args, keywords.get(), call.result.get());
    if (learned.get() != Py_None && (made == 1 || is_layer)) learn(route, call.plan, learned);
  }

  bool is_linear(const Call& call) const {
    if (PyTuple_GET_SIZE(call.args) < 2) return false;
    if (PyTuple_GET_ITEM(call.args, 0) == PyTuple_GET_ITEM(call.args, 1)) return false;
    PyObject* stem = fields_.of(call.plan, fields_.stem);
    return stem == linear_.get() || PyUnicode_Compare(stem, linear_.get()) == 0;
  }

  // As `follow` in overflow/backward_calls.py; of one node only its number counts.
  static bool hangs_together(
      const Call& call, const NodePtr& root, const std::vector<Below>& layout, bool is_one,
      std::vector<std::pair<NodePtr, std::shared_ptr<const Spots>>>& ends) {
    if (is_one) {
      if (root->sequence_nr() != call.start) return false;
      ends.emplace_back(root, layout[0].spots);
      return true;
    }
    std::vector<NodePtr> nodes;
    for (const Below& below : layout) {
      NodePtr node = root;
      if (below.above) {
        const auto& edges = nodes[below.above - 1]->next_edges();
        if (below.position >= edges.size()) return false;
        node = edges[below.position].function;
      }
      if (!node || node->sequence_nr() < call.start || node->sequence_nr() >= LEAF) return false;
      const auto& edges = node->next_edges();
      for (size_t i = 0; i < below.arguments.size(); ++i) {
        const size_t place = below.spots->places[i].position;
        const NodePtr after = place < edges.size() ? edges[place].function : NodePtr();
        const NodePtr given = tensor_in(PyTuple_GET_ITEM(call.args, below.arguments[i])).grad_fn();
        // to a copy that autocast has kept, for one
        if (!after || (given ? after != given : after->sequence_nr() != LEAF)) return false;
      }
      nodes.push_back(node);
      if (!below.arguments.empty()) ends.emplace_back(node, below.spots);
    }
    return true;
  }

  // From now on this is known: spots of one node, or a `Layout`.
  void learn(const Route& route, const Ref& plan, const Ref& learned) {
    auto known = std::make_shared<Known>();
    known->plan = plan;
    if (route.made == 1) {
      known->nodes.push_back({0, 0, std::make_shared<const Spots>(learned.get()), {}});
    } else {
      const Ref layout = must(PySequence_Tuple(learned.get()));
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(layout.get()); ++i) {
        PyObject* spots;
        Py_ssize_t above, position;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(layout.get(), i), "nnO", &above, &position,
                              &spots)) {
          throw python_error();
        }
        TORCH_CHECK(above >= 0 && above <= i && (above || !i), "a node hangs at one before it");
        Below below{static_cast<size_t>(above), static_cast<size_t>(position),
                    std::make_shared<const Spots>(spots), {}};
        for (const auto& place : below.spots->places) {
          const Ref text = Ref::borrow(PyTuple_GetItem(place.path.get(), 0));
          if (!text) throw python_error();
          const Ref number = must(PyLong_FromUnicodeObject(text.get(), 10));
          const Py_ssize_t argument = PyLong_AsSsize_t(number.get());
          TORCH_CHECK(argument >= 0 && argument < 64 && route.needs >> argument & 1,
                      "a spot is of an argument");
          below.arguments.push_back(argument);
        }
        known->nodes.push_back(std::move(below));
      }
    }
    routes_[route] = std::move(known);
  }

  void listen(const NodePtr& node, const Ref& call, const std::shared_ptr<const Spots>& spots);

  // -- Backward ------------------------------------------------------------------------------

  // As `gradients_later`.
  void gradients(const Ref& call, const Spots& spots, long passing, const variable_list& grads,
                 const variable_list& incoming) {
    bool any = false;
    for (const auto& place : spots.places) {
      if (place.position >= grads.size() || !grads[place.position].defined()) continue;
      if (!has_numbers(*grads[place.position].unsafeGetTensorImpl())) {
        return gradients_otherwise(call, spots, passing, grads, incoming);
      }
      any = true;
    }
    if (!any) return;
    std::vector<Ref> held, given;
    const at::TensorImpl* last = nullptr;
    for (const auto& place : spots.places) {
      if (place.position >= grads.size() || !grads[place.position].defined()) continue;
      const at::Tensor& grad = grads[place.position];
      if (grad.unsafeGetTensorImpl() == last) {  // a sum's: once is enough
        Ref again = must(PyTuple_New(PyTuple_GET_SIZE(held.back().get())));
        PyTuple_SET_ITEM(again.get(), 0, Py_NewRef(place.path.get()));
        for (Py_ssize_t i = 1; i < PyTuple_GET_SIZE(again.get()); ++i) {
          PyTuple_SET_ITEM(again.get(), i, Py_NewRef(PyTuple_GET_ITEM(held.back().get(), i)));
        }
        held.push_back(again);
        continue;
      }
      const Ref source = passing ? source_of(grad, passing, incoming) : Ref();
      held.push_back(hold(grad, nullptr, place.path.get(), !source));
      if (held.back().get() == Py_None) {
        held.pop_back();
        continue;
      }
      last = grad.unsafeGetTensorImpl();
      PyObject* key = PyTuple_GET_ITEM(held.back().get(), 1);
      const bool is_source =
          source && PyObject_RichCompareBool(source.get(), key, Py_EQ) == 1;
      if (!is_source) keep_span(grad, held.back());
      if (source) given.push_back(tuple_of(place.path.get(), source.get()));
    }
    if (held.empty()) return;
    const Ref inputs = tuple_from(given), outputs = tuple_from(held);
    add(call.get(), word<"backward">(), inputs.get(), outputs.get(), true);
    look_if_due();
  }

  void gradients_otherwise(const Ref& call, const Spots& spots, long passing,
                           const variable_list& grads, const variable_list& incoming) {
    const Ref sent = wrapped(grads), came = wrapped(incoming), number = whole_number(passing);
    PyObject* arguments[] = {backward_.get(), call.get(), spots.list.get(),
                             number.get(), sent.get(), came.get()};
    must(PyObject_Vectorcall(send_later_.get(), arguments, 6, nullptr));
  }

  static Ref wrapped(const variable_list& tensors) {
    std::vector<Ref> all;
    for (const at::Tensor& tensor : tensors) {
      all.push_back(tensor.defined() ? must(THPVariable_Wrap(tensor)) : Ref::borrow(Py_None));
    }
    return tuple_from(all);
  }

  // As `PendingCalls._source_of`: the memory, looked at before, whose values a gradient has.
  Ref source_of(const at::Tensor& grad, long passing, const variable_list& incoming) const {
    const at::TensorImpl* source = grad.unsafeGetTensorImpl();
    if (passing == copied_) {
      if (incoming.size() != 1 || !incoming[0].defined()) return Ref();
      source = incoming[0].unsafeGetTensorImpl();
      if (!has_numbers(*source) || incoming[0].is_cpu() != grad.is_cpu()) return Ref();
      if (numbers_of(*source).most > numbers_of(*grad.unsafeGetTensorImpl()).most) return Ref();
    }
    const Ref spans = attribute<"spans">(known_);
    Ref key = must(PyLong_FromVoidPtr(source->unsafe_storage().unsafeGetStorageImpl()));
    PyObject* seen = PyDict_GetItemWithError(spans.get(), key.get());
    if (seen == nullptr) return Ref();
    PyObject* dtype;
    long long version, begin, end;
    if (!PyArg_ParseTuple(seen, "OLLL", &dtype, &version, &begin, &end)) throw python_error();
    const auto [first, past] = span_of(*source);
    const bool is_same = dtype == numbers_of(*source).dtype.get() &&
                         version == source->version_counter().current_version();
    return is_same && begin <= first && past <= end ? key : Ref();
  }

  // As `PendingCalls._keep_span`, of a gradient that is `held`.
  void keep_span(const at::Tensor& grad, const Ref& held) const {
    const at::TensorImpl& impl = *grad.unsafeGetTensorImpl();
    const Ref spans = attribute<"spans">(known_);
    const Ref key = Ref::borrow(PyTuple_GET_ITEM(held.get(), 1));
    const bool is_whole = PyTuple_GET_ITEM(held.get(), 6) == Py_True;
    if (is_whole && count_of(impl)) {
      const auto [first, past] = span_of(impl);
      const Ref version = whole_number(impl.version_counter().current_version()),
                begin = whole_number(first), end = whole_number(past);
      put(spans, key,
          tuple_of(numbers_of(impl).dtype.get(), version.get(), begin.get(), end.get()));
    } else if (PyDict_GetItemWithError(spans.get(), key.get()) != nullptr) {
      if (PyDict_DelItem(spans.get(), key.get()) < 0) throw python_error();
    }
  }

  // Where its numbers begin and end in memory.
  static std::pair<int64_t, int64_t> span_of(const at::TensorImpl& tensor) {
    int64_t extent = 1;
    for (int64_t i = 0; i < tensor.dim(); ++i) extent += (tensor.size(i) - 1) * tensor.stride(i);
    const auto begin = static_cast<int64_t>(reinterpret_cast<uintptr_t>(tensor.data()));
    return {begin, begin + extent * static_cast<int64_t>(tensor.itemsize())};
  }

  // How the gradients of a node come by their values, as `PASSING` has it.
  long passing_of(const Node& node) {
    auto known = passing_by_type_.find(&typeid(node));
    if (known == passing_by_type_.end()) {
      PyObject* found = PyDict_GetItemString(passing_.get(), node.name().c_str());
      const long passing = found == nullptr ? 0 : PyLong_AsLong(found);
      known = passing_by_type_.emplace(&typeid(node), passing).first;
    }
    return known->second;
  }

  Ref mode_, observer_, state_, backward_, device_, pending_, known_, counter_, place_, watcher_;
  Ref plans_, send_later_;
  StandIns stand_ins_;
  Ref casts_, moves_, passes_, scales_, nowhere_, linear_, getframe_, modules_, compiler_;
  Ref positions_, atoms_, passing_;
  Fields fields_;
  std::array<Numbers, static_cast<size_t>(c10::ScalarType::NumOptions) + 1> numbers_;
  bool on_host_ = false, is_late_ = false;
  Py_ssize_t look_every_ = -1, most_arguments_ = 0;
  long copied_ = 0;
  std::unordered_map<const std::type_info*, long> passing_by_type_;
  std::unordered_map<int64_t, std::unique_ptr<Device>> devices_;
  std::unordered_map<Route, std::shared_ptr<const Known>, HashRoute> routes_;
  std::shared_ptr<Token> token_ = std::make_shared<Token>();
};

// A hook on a node at the edge of an input: the call sends gradients on.
struct Sent : torch::autograd::FunctionPostHook {
  Sent(std::shared_ptr<Token> to, Ref of, std::shared_ptr<const Spots> at, long how)
      : token(std::move(to)), call(std::move(of)), spots(std::move(at)), passing(how) {}

  ~Sent() override {  // in whatever thread the graph is freed
    if (!Py_IsInitialized()) {
      call.release();  // Python has gone, and its objects with it
      new std::shared_ptr<const Spots>(std::move(spots));
      return;
    }
    pybind11::gil_scoped_acquire gil;
    call = Ref();
    spots.reset();
  }

  variable_list operator()(const variable_list& outputs, const variable_list& inputs) override {
    with_python([&] {
      if (token->observer == nullptr) return;  // the guard is gone, the graph is not
      const Ref box = Ref::borrow(token->box);
      token->observer->outgoing(call, *spots, passing, outputs, inputs);
    });
    return outputs;
  }

  COMPILED_ARGS(args) {
    pybind11::gil_scoped_acquire gil;
    if (token->observer == nullptr) return;
    Ref hook = token->observer->python_hook(call, *spots, passing);
    args.add_post_hook(c10::SafePyObject(hook.release(), getPyInterpreter()));
  }

  std::shared_ptr<Token> token;
  Ref call;
  std::shared_ptr<const Spots> spots;
  long passing;  // how what it sends comes by its values
};

inline void EveryCall::listen(const NodePtr& node, const Ref& call,
                          const std::shared_ptr<const Spots>& spots) {
  if (Edges::has_python_hooks(node->post_hooks(), "N5torch8autograd18PyFunctionPostHookE")) {
    const Ref hook = python_hook(call, *spots, passing_of(*node));
    Edges::registered(torch::autograd::registerFunctionHook(*node, hook.get()));
  } else {
    node->add_post_hook(std::make_unique<Sent>(token_, call, spots, passing_of(*node)));
  }
}

}  // namespace tensorprobe
