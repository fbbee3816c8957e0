// A recorded torch call from the function mode to its lines: what `follow.function_mode.CallMode`
// and `record.tape.Tape` do of plain calls, those that most are.
#pragma once

#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/MemoryFormat.h>
#include <torch/csrc/Size.h>
#include <torch/csrc/autograd/graph_task.h>

#include <charconv>
#include <optional>

#include "backward.h"
#include "lines.h"
#include "tensor_lines.h"
#include "writer.h"
#include "stacks.h"
#include "stand_ins.h"
#include "text.h"
#include "torch_versions.h"

namespace tensorprobe {

// Python's side of it: `record.tape.Tape.plain_calls` says what each is.
struct Recording {
  Ref tape, lines, log, plans, describe, counter, place, keep;
  std::optional<StackTable> stacks;  // where they are wanted
  StandIns stand_ins;
  Ref compiler, state_notes, encode, positions, only_path, output_spots, no_aliases;
  Ref open_call, out, call_names, call_line, end_line, stack_line, raw, one_node, one_way, any_way, node_run;
  bool wants_input = false, wants_output = false;
};

class Calls : public Follower {
 public:
  using BoxEdges = PyObject* (*)(std::unique_ptr<Edges>);

  Calls(Recording python, Lines& lines, Log& log, BoxEdges box_edges)
      : python_(std::move(python)), lines_(lines), log_(log), box_edges_(box_edges),
        spell_(python_.encode), tape_(python_.tape.get()), counter_(python_.counter.get()),
        call_form_(python_.call_line, {"id", "name", "op", "module", "direction", "thread", "parent",
                                       "stack", "args", "kwargs", "notes"}),
        end_form_(python_.end_line, {"id", "outputs", "notes"}),
        stack_form_(python_.stack_line, {"id", "frames"}) {}

  // Make a call and record it; the mode itself where Python is to do all of it, and nothing was done.
  // `self` is the object of Python that has this.
  PyObject* call(PyObject* self, PyObject* mode, PyObject* func, PyObject* args, PyObject* kwargs) {
    if (kwargs == Py_None) kwargs = nullptr;
    if (!python_.tape || StandIns::is_tracing() || !is_known_kind(func) || !PyTuple_CheckExact(args) ||
        (kwargs != nullptr && !PyDict_CheckExact(kwargs))) {
      return Py_NewRef(mode);
    }
    const Ref found = plan_of(mode, func);
    if (!found) return nullptr;
    if (found.get() == Py_False) return PyObject_Call(func, args, kwargs);  // nor ever warns
    StandIns& stand_ins = python_.stand_ins;
    if (found.get() == Py_None) return stand_ins.make(func, args, kwargs);  // it has no name
    Open open;
    open.owner = self;
    Ref place;
    bool is_plain = false;
    if (!attempt([&] { is_plain = looks_plain(mode, found.get(), args, kwargs, open, place); })) {
      if (!PyErr_ExceptionMatches(PyExc_Exception)) return nullptr;
      PyErr_Clear();  // it comes again in Python
    }
    if (!is_plain) return Py_NewRef(mode);
    open.number = next_number(*open.api);
    const bool begun = attempt([&] { begin(open, place.get(), args, kwargs); });
    if (!begun && !gap(open)) return nullptr;
    Ref result = Ref::steal(stand_ins.make(func, args, kwargs));
    if (!begun) return result.release();
    if (!result) return raised(open);
    bool is_written = false;
    const bool ended = attempt([&] { is_written = end(open, result.get()); });
    if (!ended && !end_failed(open)) return nullptr;
    if (ended && !is_written && !end_in_python(open, result.get())) return nullptr;
    return result.release();
  }

  int traverse(visitproc visit, void* arg) const {
    const Recording& p = python_;
    for (const Ref* ref : {&p.tape, &p.lines, &p.log, &p.plans, &p.describe, &p.counter, &p.place}) {
      if (int stop = ref->visit(visit, arg)) return stop;
    }
    if (p.stacks) {
      if (int stop = p.stacks->traverse(visit, arg)) return stop;
    }
    if (int stop = p.stand_ins.traverse(visit, arg)) return stop;
    if (int stop = tape_.visit(visit, arg)) return stop;
    return counter_.visit(visit, arg);
  }
  void let_go() {
    apis_.clear();
    tape_ = counter_ = Fields();
    const Recording gone = std::exchange(python_, Recording());
  }

 private:
  struct Input {
    Ref tensor, path;
    int64_t version;
  };

  // As `record.calls.OpenCall`, which Python is given where it has to go on.
  struct Open {
    PyObject* owner = nullptr;
    std::shared_ptr<const Api> api;
    long long number = 0;
    Ref step, module, parent, thread, stack;
    long long id = -1;
    bool grad = false;
    std::vector<Input> inputs;
    std::unique_ptr<Edges> own_edges;
    Ref edges_object;  // has them, once Python knows of them
    Edges* edges = nullptr;
    Ref names;
    Ref writes;  // as in `Api`, with `out` where that is given
  };

  // Where in the arguments a value is.
  struct Spot {
    const Spot* around;
    PyObject* name;   // of a keyword, or
    Py_ssize_t index;  // of a position
  };

  static constexpr Py_ssize_t MAX_ITEMS = 64;
  static constexpr int MAX_DEPTH = 4;
  static constexpr size_t MAX_APIS = 20'000;

  // The fields of lines, as the constructor names them.
  enum CallField { ID, NAME, OP, MODULE, DIRECTION, THREAD, PARENT, STACK, ARGS, KWARGS, NOTES };
  enum EndField { END_ID, OUTPUTS, END_NOTES };
  enum StackField { STACK_ID, FRAMES };

  // -- Python's objects ----------------------------------------------------------------------

  // Whether asking for its hash, and whether it is equal, runs no Python.
  static bool is_known_kind(PyObject* func) {
    const PyTypeObject* type = Py_TYPE(func);
    return type == &PyCFunction_Type || type == &PyMethodDescr_Type || type == &PyFunction_Type ||
           type == method_wrapper_type() || type == &PyWrapperDescr_Type;
  }

  // The ApiName of a function's calls, None where they have none. Worked out here: a function goes
  // the same way from its first call on, and stacks from inside of it have the same frames.
  Ref plan_of(PyObject* mode, PyObject* func) const {
    PyObject* const method = word<"_plan">();
    Ref found = Ref::borrow(PyDict_GetItemWithError(python_.plans.get(), func));
    if (found || PyErr_Occurred()) return found;
    return Ref::steal(PyObject_CallMethodOneArg(mode, method, func));
  }

  // -- Before anything is done ---------------------------------------------------------------

  bool looks_plain(PyObject* mode, PyObject* found, PyObject* args, PyObject* kwargs, Open& open,
                   Ref& place) {
    PyObject* const dispatch_depth = word<"dispatch_depth">();
    PyObject* const recording = word<"recording">();
    PyObject* const only = word<"only">();
    PyObject* const is_open = word<"is_open">();
    PyObject* const pending = word<"_unfinished">();
    PyObject* const step = word<"step">();
    PyObject* const module = word<"module">();
    PyObject* const parent = word<"parent">();
    if (is_compiling() || compiled_may_run() || !at::functorch::getDynamicLayerStack().empty()) {
      return false;
    }
    Ref depth = Fields(mode).get(dispatch_depth);
    if (!PyLong_CheckExact(depth.get()) || PyLong_AsLong(depth.get()) != 0) return false;
    if (tape_.get(recording).get() != Py_True || tape_.get(only).get() != Py_None ||
        tape_.get(is_open).get() != Py_True) {
      return false;
    }
    Ref work = tape_.get(pending);
    if (!PyList_CheckExact(work.get()) || PyList_GET_SIZE(work.get())) return false;
    if (!are_plain(args, kwargs)) return false;
    open.api = api_of(found);
    if (!open.api->is_plain) return false;
    place = place_dict();
    open.module = Ref::borrow(PyDict_GetItemWithError(place.get(), module));
    open.parent = Ref::borrow(PyDict_GetItemWithError(place.get(), parent));
    open.thread = Ref::borrow(PyDict_GetItemWithError(place.get(), thread_name()));
    if (!open.module || !open.parent || !open.thread) {
      if (PyErr_Occurred()) throw python_error();
      return false;
    }
    if (!is_text(open.module) || !is_text(open.thread)) return false;
    if (open.parent.get() != Py_None && !is_text(open.parent)) return false;
    open.step = tape_.get(step);
    open.grad = c10::GradMode::is_enabled();
    return true;
  }

  static bool is_text(const Ref& object) {  // that UTF-8 can carry
    return PyUnicode_CheckExact(object.get()) && PyUnicode_IS_ASCII(object.get());
  }

  bool is_compiling() const {  // as torch.compiler.is_compiling
    PyObject* const flag = word<"_is_compiling_flag">();
    PyObject* found = PyDict_GetItemWithError(python_.compiler.get(), flag);
    if (found == nullptr && PyErr_Occurred()) throw python_error();
    return found != Py_False;
  }

  static bool compiled_may_run() {  // as `follow.compiled.may_run`
    PyObject* const module = literal<"torch._dynamo.convert_frame">();
    PyObject* const counter = literal<"FRAME_COUNTER">();
    PyObject* found = PyDict_GetItemWithError(PyImport_GetModuleDict(), module);
    if (found == nullptr) {
      if (PyErr_Occurred()) throw python_error();
      return false;
    }
    const Ref held = Ref::steal(PyObject_GenericGetDict(found, nullptr));
    if (!held) throw python_error();
    PyObject* count = PyDict_GetItemWithError(held.get(), counter);
    if (count == nullptr) {  // while another thread imports it
      if (PyErr_Occurred()) throw python_error();
      return false;
    }
    return !PyLong_CheckExact(count) || PyLong_AsLong(count) != 0;
  }

  std::shared_ptr<const Api> api_of(PyObject* found) {
    auto known = apis_.find(found);
    if (known != apis_.end()) return known->second;
    auto api = std::make_shared<Api>();
    api->api = Ref::borrow(found);
    Ref described = must(PyObject_CallOneArg(python_.describe.get(), found));
    if (described.get() != Py_None) {
      PyObject *before, *after, *op, *writes;
      if (!PyArg_ParseTuple(described.get(), "UUUO!", &before, &after, &op, &PyFrozenSet_Type,
                            &writes)) {
        throw python_error();
      }
      if (PySet_GET_SIZE(writes)) api->writes = Ref::borrow(writes);
      api->before = Ref::borrow(before), api->after = Ref::borrow(after);
      api->text_before = spell_.quoted(before);
      api->text_before.pop_back();  // the quote: the number follows
      api->text_after = spell_.quoted(after).substr(1);
      api->text_op = spell_.quoted(op);
      api->is_ascii = PyUnicode_IS_COMPACT_ASCII(before) && PyUnicode_IS_COMPACT_ASCII(after);
      api->has_backward = PyUnicode_CompareWithASCIIString(after, ".forward") == 0;
      api->is_plain = true;
    }
    if (apis_.size() >= MAX_APIS) apis_.clear();
    apis_[found] = api;
    return api;
  }

  static std::string utf8(PyObject* text) {
    Py_ssize_t size;
    const char* data = PyUnicode_AsUTF8AndSize(text, &size);
    if (data == nullptr) throw python_error();
    return std::string(data, size);
  }

  bool are_plain(PyObject* args, PyObject* kwargs) const {
    const Py_ssize_t count = PyTuple_GET_SIZE(args);
    if (count > MAX_ITEMS) return false;
    for (Py_ssize_t i = 0; i < count; ++i) {
      if (!is_plain_value(PyTuple_GET_ITEM(args, i), 0)) return false;
    }
    if (kwargs == nullptr) return true;
    PyObject *key, *value;
    Py_ssize_t at = 0;
    while (PyDict_Next(kwargs, &at, &key, &value)) {
      if (!Spell::is_simple(key) || !is_plain_value(value, 0)) return false;
    }
    return true;
  }

  static bool is_plain_value(PyObject* value, int depth) {
    if (is_own_type(value)) return is_plain(*tensor_in(value).unsafeGetTensorImpl());
    if (value == Py_None || PyBool_Check(value) || PyFloat_CheckExact(value)) return true;
    if (PyLong_CheckExact(value)) return is_small(value);
    if (PyUnicode_CheckExact(value)) {
      return PyUnicode_IS_ASCII(value) && PyUnicode_GET_LENGTH(value) <= 1000;
    }
    if (PyTuple_CheckExact(value) || PyList_CheckExact(value)) {
      const Py_ssize_t count = Py_SIZE(value);
      if (depth >= MAX_DEPTH || count > MAX_ITEMS) return false;
      PyObject** items = PySequence_Fast_ITEMS(value);
      for (Py_ssize_t i = 0; i < count; ++i) {
        if (!is_plain_value(items[i], depth + 1)) return false;
      }
      return true;
    }
    if (THPSize_Check(value)) {
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i) {
        if (!is_small(PyTuple_GET_ITEM(value, i))) return false;
      }
      return true;
    }
    if (PySlice_Check(value)) {
      auto* slice = reinterpret_cast<PySliceObject*>(value);
      for (PyObject* part : {slice->start, slice->stop, slice->step}) {
        if (part != Py_None && !is_small(part)) return false;
      }
      return true;
    }
    return value == Py_Ellipsis || THPDtype_Check(value) || THPDevice_Check(value) ||
           THPLayout_Check(value) || THPMemoryFormat_Check(value);
  }

  static bool is_small(PyObject* value) {  // a number that is written as it is
    if (!PyLong_CheckExact(value)) return false;
    int overflow = 0;
    PyLong_AsLongLongAndOverflow(value, &overflow);
    return !overflow;
  }

  // -- The beginning -------------------------------------------------------------------------

  // As `follow.naming.Counter.next_name`.
  long long next_number(const Api& api) const {
    PyObject* const by_api = word<"_by_api">();
    PyObject* const make = word<"_new">();
    Ref counts = counter_.get(by_api);  // another with every step
    if (counts.get() != api.counts.get()) {
      Ref known = Ref::borrow(PyDict_GetItemWithError(counts.get(), api.api.get()));
      if (!known) {
        if (PyErr_Occurred()) throw python_error();
        known = must(PyObject_CallMethodOneArg(python_.counter.get(), make, api.api.get()));
        counts = Ref();  // it may be in another by now
      }
      const Ref count = Ref::borrow(PyTuple_GetItem(known.get(), 0));
      if (!count) throw python_error();
      api.count = count, api.counts = counts;
      return next_of(count.get());
    }
    const Ref count = api.count;
    return next_of(count.get());
  }

  static long long next_of(PyObject* count) {
    Ref number = must(PyIter_Next(count));
    const long long value = PyLong_AsLongLong(number.get());
    if (value == -1 && PyErr_Occurred()) throw python_error();
    return value;
  }

  // As `Tape.begin`.
  void begin(Open& open, PyObject* place, PyObject* args, PyObject* kwargs) {
    PyObject* const ids = word<"ids">();
    PyObject* const record_functions = word<"_record_functions_of">();
    open.stack = python_.stacks ? stack_number(place) : Ref::borrow(Py_None);
    const FunctionsOff off;
    LineText line(call_form_, 1000);
    open.inputs.reserve(4);
    add_arguments(open, args, kwargs, line);
    note_writes(open, kwargs);
    for (Input& input : open.inputs) input.version = version_in(input.tensor);
    if (has_state_notes()) {
      PyObject* grad = open.grad ? Py_True : Py_False;
      Ref said = must(PyObject_CallOneArg(python_.state_notes.get(), grad));
      if (PyObject_IsTrue(said.get()) == 1) line.field(NOTES) += spell_.json(said.get());
    }
    if (open.grad) {
      open.own_edges = std::make_unique<Edges>();
      open.edges = open.own_edges.get();
      open.edges->expect(open.inputs.size());
      for (const Input& input : open.inputs) open.edges->add(input.tensor.get(), input.path.get());
      if (open.edges->has_functions()) {
        PyObject* edges = edges_object(open).get();
        must(PyObject_CallMethodOneArg(python_.tape.get(), record_functions, edges));
      }
    }
    open.id = next_of(tape_.get(ids).get());
    append_number(line.field(ID), open.id);
    add_name(line, *open.api, open.number, open.api->text_after);
    if (PyUnicode_GET_LENGTH(open.module.get())) {
      line.field(MODULE) += module_text_.of(spell_, open.module);
    }
    if (open.parent.get() != Py_None) line.field(PARENT) += parent_text_.of(spell_, open.parent);
    add_place(line, open.thread, open.stack);
    if (!log_.call_text(line.finish())) throw python_error();
  }

  static void add_name(LineText& line, const Api& api, long long number, const std::string& after) {
    std::string& name = line.field(NAME) += api.text_before;
    append_number(name, number);
    name += after;
    line.field(OP) += api.text_op;
  }

  void add_place(LineText& line, const Ref& thread, const Ref& stack) const {
    if (thread.get() != literal<"MainThread">()) {  // as msgspec: it is the default itself
      line.field(THREAD) += spell_.quoted(thread.get());
    }
    if (stack.get() != Py_None) {
      append_number(line.field(STACK), PyLong_AsLongLong(stack.get()));
    }
  }

  // As `Tape._writes_to`.
  void note_writes(Open& open, PyObject* kwargs) const {
    PyObject* const out = literal<"out">();
    open.writes = open.api->writes;
    if (kwargs == nullptr) return;
    const int has_out = PyDict_Contains(kwargs, out);
    if (has_out < 0) throw python_error();
    if (!has_out) return;
    if (open.writes) {
      open.writes = must(PyNumber_Or(open.writes.get(), python_.out.get()));
    } else {
      open.writes = python_.out;
    }
  }

  static bool is_declared(const Open& open, const Input& input) {
    if (!open.writes) return false;
    const int found = PySet_Contains(open.writes.get(), PyTuple_GET_ITEM(input.path.get(), 0));
    if (found < 0) throw python_error();
    return found;
  }

  static bool has_state_notes() {  // a little more often than `_state_notes` has any
    const auto off = c10::impl::tls_local_dispatch_key_set().excluded_;
    return !(c10::autocast_dispatch_keyset - off).empty() ||
           torch::autograd::get_current_graph_task_id() != -1;
  }

  static int64_t version_in(const Ref& tensor) {
    const auto& counter = tensor_in(tensor.get()).unsafeGetTensorImpl()->version_counter();
    return counter.enabled() ? static_cast<int64_t>(counter.current_version()) : -1;
  }

  // Of the program's own frame: the mode's is the one this is called from.
  Ref stack_number(PyObject* place) {
    return python_.stacks->number(place, calling_frame(), [&](const Ref& number, const Ref& frames) {
      const Ref line = stack_line(number, frames);
      return line && log_.wait(line);
    });
  }

  // One that an earlier step was told is the same text.
  Ref stack_line(const Ref& number, const Ref& frames) {
    const long long id = PyLong_AsLongLong(number.get());
    auto known = stack_lines_.find(id);
    if (known != stack_lines_.end()) return known->second;
    Ref line;
    const bool is_made = attempt([&] {
      LineText made(stack_form_, 500);
      append_number(made.field(STACK_ID), id);
      made.field(FRAMES) += spell_.json(frames.get());
      const std::string text = made.finish();
      line = must(PyBytes_FromStringAndSize(text.data(), text.size()));
    });
    if (!is_made) {  // a file whose name is not UTF-8
      if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) throw python_error();
      PyErr_Clear();
      return Ref();
    }
    if (stack_lines_.size() >= MAX_STACKS) stack_lines_.clear();
    stack_lines_[id] = line;
    return line;
  }

  // -- Arguments -----------------------------------------------------------------------------

  void add_arguments(Open& open, PyObject* args, PyObject* kwargs, LineText& line) {
    const Py_ssize_t count = PyTuple_GET_SIZE(args);
    if (count) {
      std::string& text = line.field(ARGS);
      for (Py_ssize_t i = 0; i < count; ++i) {
        text += i ? "," : "[";
        append_value(open, PyTuple_GET_ITEM(args, i), {nullptr, nullptr, i}, text);
      }
      text += "]";
    }
    if (kwargs == nullptr || !PyDict_GET_SIZE(kwargs)) return;
    std::vector<std::pair<Ref, Ref>> given;  // held: Python may come by the dict meanwhile
    PyObject *key, *value;
    Py_ssize_t at = 0;
    while (PyDict_Next(kwargs, &at, &key, &value)) {
      given.emplace_back(Ref::borrow(key), Ref::borrow(value));
    }
    std::string& text = line.field(KWARGS);
    for (size_t i = 0; i < given.size(); ++i) {
      const auto& [name, argument] = given[i];
      text += i ? "," : "{";
      text.append(spell_.quoted(name.get())).append(":");
      append_value(open, argument.get(), {nullptr, name.get(), 0}, text);
    }
    text += "}";
  }

  void append_value(Open& open, PyObject* value, const Spot& spot, std::string& text) {
    if (is_own_type(value)) {
      append_tensor(open, value, spot, text);
    } else if (PyTuple_CheckExact(value)) {
      text += "{\"tuple\":";
      append_items(open, value, spot, text);
      text += "}";
    } else if (PyList_CheckExact(value)) {
      append_items(open, value, spot, text);
    } else {
      append_atom(value, text);
    }
  }

  void append_items(Open& open, PyObject* sequence, const Spot& spot, std::string& text) {
    text += "[";
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(sequence); ++i) {
      Ref item = Ref::borrow(PySequence_Fast_GET_ITEM(sequence, i));
      if (i) text += ",";
      append_value(open, item.get(), {&spot, nullptr, i}, text);
    }
    text += "]";
  }

  void append_tensor(Open& open, PyObject* tensor, const Spot& spot, std::string& text) {
    PyObject* const input = literal<"input">();
    Ref path = path_of(spot);
    std::string same;
    for (const Input& other : open.inputs) {
      if (other.tensor.get() != tensor) continue;
      same = "input";
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(other.path.get()); ++i) {
        same.append(".").append(utf8(PyTuple_GET_ITEM(other.path.get(), i)));
      }
      break;
    }
    open.inputs.push_back({Ref::borrow(tensor), path, 0});
    const bool grad = tensor_in(tensor).requires_grad();
    if (!lines_.append(tensor, grad, input, path.get(), python_.wants_input, python_.keep.get(),
                       same.empty() ? nullptr : &same, text)) {
      throw python_error();
    }
  }

  Ref path_of(const Spot& spot) const {
    if (spot.around == nullptr && spot.name == nullptr) {
      return Ref::borrow(PyList_GetItem(python_.positions.get(), spot.index));
    }
    Py_ssize_t depth = 0;
    for (const Spot* at = &spot; at != nullptr; at = at->around) ++depth;
    Ref path = must(PyTuple_New(depth));
    for (const Spot* at = &spot; at != nullptr; at = at->around) {
      PyObject* part = at->name != nullptr ? Py_NewRef(at->name)
                                           : PyUnicode_FromFormat("%zd", at->index);
      if (part == nullptr) throw python_error();
      PyTuple_SET_ITEM(path.get(), --depth, part);
    }
    return path;
  }

  // Of a value without parts that `is_plain_value`.
  void append_atom(PyObject* value, std::string& text) {
    if (value == Py_None) {
      text += "null";
    } else if (PyBool_Check(value)) {
      text += value == Py_True ? "true" : "false";
    } else if (PyLong_CheckExact(value)) {
      append_number(text, PyLong_AsLongLong(value));
    } else if (PyFloat_CheckExact(value)) {
      text += spell_.number(PyFloat_AS_DOUBLE(value));
    } else if (PyUnicode_CheckExact(value)) {
      text += spell_.quoted(value);
    } else if (THPSize_Check(value)) {
      text += "{\"tuple\":[";
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i) {
        if (i) text += ",";
        append_number(text, PyLong_AsLongLong(PyTuple_GET_ITEM(value, i)));
      }
      text += "]}";
    } else if (PySlice_Check(value)) {
      auto* slice = reinterpret_cast<PySliceObject*>(value);
      text += "{\"slice\":[";
      append_atom(slice->start, text);
      text += ",";
      append_atom(slice->stop, text);
      text += ",";
      append_atom(slice->step, text);
      text += "]}";
    } else if (value == Py_Ellipsis) {
      text += "{\"ellipsis\":true}";
    } else if (THPDevice_Check(value)) {
      const std::string device = reinterpret_cast<THPDevice*>(value)->device.str();
      text.append("{\"special\":[\"device\",\"").append(device).append("\"]}");
    } else {
      text += special(value);
    }
    if (PyErr_Occurred()) throw python_error();
  }

  // Of a dtype and its like, of which there is one of each kind for ever.
  const std::string& special(PyObject* value) {
    auto known = words_.find(value);
    if (known != words_.end()) return known->second.second;
    const char* kind = THPDtype_Check(value)    ? "dtype"
                       : THPLayout_Check(value) ? "layout"
                                                : "memory_format";
    Ref said = must(PyObject_Str(value));
    const std::string text =
        "{\"special\":[\"" + std::string(kind) + "\"," + spell_.quoted(said.get()) + "]}";
    return words_.emplace(value, std::make_pair(Ref::borrow(value), text)).first->second.second;
  }

  // -- The end -------------------------------------------------------------------------------

  // As `Tape.end`. False where there is more to it, and nothing was done.
  bool end(Open& open, PyObject* result) {
    PyObject* const output = literal<"output">();
    const FunctionsOff off;
    bool is_mutated = false;
    for (const Input& input : open.inputs) {
      if (version_in(input.tensor) == input.version && !is_declared(open, input)) continue;
      if (input.tensor.get() != result) return false;  // it shows beside what is returned
      is_mutated = true;
    }
    LineText line(end_form_, 300);
    append_number(line.field(END_ID), open.id);
    bool is_followed = false, is_handed_through = false;
    if (is_own_type(result)) {
      const at::Tensor& tensor = tensor_in(result);
      if (!is_plain(*tensor.unsafeGetTensorImpl())) return false;
      if (open.edges != nullptr && (open.edges->has_leaves() || tensor.requires_grad())) {
        if (open.edges->is_handed_through(result)) {
          is_handed_through = true;
        } else if (tensor.grad_fn()) {
          is_followed = open.edges->find_exits(result);
          if (!is_followed) return false;
        }
      }
      if (is_mutated) lines_.forget(result);
      if (!lines_.append(result, tensor.requires_grad(), output, python_.only_path.get(),
                         python_.wants_output, python_.keep.get(), nullptr,
                         line.field(OUTPUTS))) {
        throw python_error();
      }
    } else if (PyBool_Check(result) || PyFloat_CheckExact(result) || is_small(result)) {
      append_atom(result, line.field(OUTPUTS));
    } else if (result != Py_None) {
      return false;
    }
    if (is_followed) listen(open);
    if (is_handed_through) line.field(END_NOTES) += "[\"output.0 is handed through\"]";
    const auto make_line = [&] { return end_line(open.id, line.value(OUTPUTS)); };
    const bool written = log_.end_text(line.finish(), make_line);
    if (!written) throw python_error();
    return true;
  }

  // As `Tape._trace`, of what was found by `find_exits`.
  void listen(Open& open) {
    const std::vector<Exit>& exits = open.edges->exits();
    if (exits.size() == 1 && !open.edges->is_nested() && open.api->has_backward) {
      open.edges->listen(std::make_shared<Followed>(
          Ref::borrow(open.owner), *this, open.api, open.number, open.module, open.stack,
          open.step, exits[0], !open.edges->is_one_node()));
      return;
    }
    const Ref& names = names_of(open);
    PyObject* common[] = {python_.tape.get(), names.get(), python_.keep.get(), open.stack.get(),
                          open.step.get()};
    if (exits.size() == 1 && !open.edges->is_nested()) {
      PyObject* kind = open.edges->is_one_node() ? python_.one_node.get() : python_.one_way.get();
      Ref spots = exits[0].spots();
      PyObject* given[] = {common[0], common[1], common[2], common[3], common[4], spots.get()};
      Ref backward = must(PyObject_Vectorcall(kind, given, 6, nullptr));
      open.edges->listen(backward.get(), Py_None);
      return;
    }
    Ref nothing = must(PyDict_New()), n_nodes = must(PyLong_FromSize_t(1 + exits.size()));
    PyObject* given[] = {common[0], common[1],     common[2],     common[3],
                         common[4], nothing.get(), n_nodes.get(), python_.no_aliases.get()};
    Ref backward = must(PyObject_Vectorcall(python_.any_way.get(), given, 8, nullptr));
    open.edges->listen(backward.get(), python_.output_spots.get());
  }

  // -- Backward ------------------------------------------------------------------------------

  // As `NodeBackward.incoming`.
  bool entered(Followed& call, const variable_list& grads) override {
    PyObject* const recording = word<"recording">();
    PyObject* const is_open = word<"is_open">();
    PyObject* const step = word<"step">();
    if (!python_.tape || tape_.get(recording).get() != Py_True) return true;
    if (call.n_passes || tape_.get(is_open).get() != Py_True) return false;
    Ref now = tape_.get(step);
    const int same = PyObject_RichCompareBool(now.get(), call.step.get(), Py_EQ);
    if (same < 0) throw python_error();
    Ref thread = Ref::borrow(PyDict_GetItemWithError(place_dict().get(), thread_name()));
    if (!same || !thread || !is_text(thread)) return false;
    if (!attempt([&] { enter(call, thread, grads); })) gap_of_backward(call);
    return true;
  }

  // As `NodeBackward.outgoing`, and `WayBackward.outgoing`. Not of what was entered in Python.
  bool left(Followed& call, const variable_list& grads) override {
    PyObject* const recording = word<"recording">();
    if (!python_.tape) return true;
    Ref key = key_of(call);
    Ref run = popped(key);
    if (!run) {
      if (call.is_in_python()) return false;
      if (tape_.get(recording).get() != Py_True) return true;
      if (call.is_way) {  // it came by way of a tensor that left the call unseen
        if (!entered(call, {})) return false;
        run = popped(key);
      }
    }
    if (tape_.get(recording).get() != Py_True) return true;
    if (!attempt([&] { leave(call, run, grads); })) gap_of_backward(call);
    return true;
  }

  Ref backward_of(const Followed& call) override {
    TORCH_CHECK(python_.tape, APART);
    PyObject* kind = call.is_way ? python_.one_way.get() : python_.one_node.get();
    Ref name = name_of(*call.api, call.number);
    PyObject* parts[] = {call.api->api.get(), name.get(), call.module.get()};
    Ref names = must(PyObject_Vectorcall(python_.call_names.get(), parts, 3, nullptr));
    Exit exit{NodePtr(), call.positions, {}};
    for (const Ref& path : call.paths) exit.paths.push_back(path.get());
    Ref spots = exit.spots(), n_passes = must(PyLong_FromLong(call.n_passes));
    PyObject* given[] = {python_.tape.get(), names.get(),     python_.keep.get(), call.stack.get(),
                         call.step.get(),    spots.get(), n_passes.get()};
    return must(PyObject_Vectorcall(kind, given, 7, nullptr));
  }

  static PyObject* thread_name() {
    PyObject* const thread = word<"thread">();
    return thread;
  }

  Ref place_dict() const {
    return attribute<"__dict__">(python_.place);
  }

  static Ref thread_ident() {
    return must(PyLong_FromUnsignedLong(PyThread_get_thread_ident()));
  }

  static Ref key_of(const Followed& call) {
    return must(Py_BuildValue("(Ni)", PyLong_FromVoidPtr(const_cast<Followed*>(&call)),
                             torch::autograd::get_current_graph_task_id()));
  }

  Ref running() const {
    PyObject* const running = word<"running">();
    return tape_.get(running);
  }

  // The pass that is under way, which is over.
  Ref popped(const Ref& key) const {
    Ref passes = running();
    Ref run = Ref::borrow(PyDict_GetItemWithError(passes.get(), key.get()));
    if (!run && PyErr_Occurred()) throw python_error();
    if (run && PyDict_DelItem(passes.get(), key.get()) < 0) throw python_error();
    return run;
  }

  void enter(Followed& call, const Ref& thread, const variable_list& grads) {
    PyObject* const backward = word<"backward">();
    PyObject* const entered = word<"entered">();
    PyObject* const ids = word<"ids">();
    PyObject* const input = literal<"input">();
    const FunctionsOff off;
    const Api& api = *call.api;
    Ref key = key_of(call), name = backward_name(call);
    PyObject* parts[] = {api.api.get(), name.get(), call.module.get(), backward};
    Ref names = must(PyObject_Vectorcall(python_.call_names.get(), parts, 4, nullptr));
    ++call.n_passes;
    Ref number = must(PyIter_Next(tape_.get(ids).get()));
    PyObject* given[] = {python_.tape.get(), key.get(), names.get(), python_.keep.get(),
                         number.get()};
    Ref run = must(PyObject_Vectorcall(python_.node_run.get(), given, 5, nullptr));
    if (PyDict_SetItem(running().get(), key.get(), run.get()) < 0) throw python_error();
    if (PyDict_SetItem(tape_.get(entered).get(), thread_ident().get(), run.get()) < 0) {
      throw python_error();
    }
    static const std::string after = ".backward\"";
    LineText line(call_form_, 500);
    append_number(line.field(ID), PyLong_AsLongLong(number.get()));
    add_name(line, api, call.number, after);
    if (PyUnicode_GET_LENGTH(call.module.get())) {
      line.field(MODULE) += spell_.quoted(call.module.get());
    }
    line.field(DIRECTION) += "\"backward\"";
    add_place(line, thread, call.stack);
    if (!grads.empty()) {
      std::string& args = line.field(ARGS) += "[";
      append_gradient(run, grads[0], input, python_.only_path.get(), python_.wants_input, args);
      args += "]";
    }
    if (!log_.call_text(line.finish())) throw python_error();
  }

  void leave(Followed& call, const Ref& run, const variable_list& grads) {
    PyObject* const entered = word<"entered">();
    PyObject* const output = literal<"output">();
    Ref calls = tape_.get(entered), ident = thread_ident();
    const int is_in = PyDict_Contains(calls.get(), ident.get());
    if (is_in < 0 || (is_in && PyDict_DelItem(calls.get(), ident.get()) < 0)) throw python_error();
    if (!run || run.get() == Py_None) return;
    const FunctionsOff off;
    Ref number = attribute<"id">(run);
    const long long value = PyLong_AsLongLong(number.get());
    LineText line(end_form_, 500);
    append_number(line.field(END_ID), value);
    std::string& outputs = line.field(OUTPUTS) += "{\"dict\":[";
    for (size_t i = 0; i < call.paths.size(); ++i) {
      PyObject* path = call.paths[i].get();
      outputs.append(i ? ",[" : "[").append(spell_.quoted(PyTuple_GET_ITEM(path, 0))).append(",");
      append_gradient(run, grads.at(call.positions[i]), output, path, python_.wants_output,
                      outputs);
      outputs += "]";
    }
    outputs += "]}";
    const auto make_line = [&] { return end_line(value, line.value(OUTPUTS)); };
    if (!log_.end_text(line.finish(), make_line)) throw python_error();
  }

  void append_gradient(const Ref& run, const at::Tensor& grad, PyObject* role, PyObject* path,
                       bool wanted, std::string& text) {
    if (!grad.defined()) {
      text += "null";
      return;
    }
    Ref object = must(THPVariable_Wrap(grad));
    if (is_own_type(object.get()) && is_plain(*grad.unsafeGetTensorImpl())) {
      if (!lines_.append(object.get(), false, role, path, wanted, python_.keep.get(), nullptr,
                         text)) {
        throw python_error();
      }
      return;
    }
    Ref tree = must(lines_.encoded(object.get(), run.get(), role, path,
                                  wanted ? Py_True : Py_False, Py_False));
    text += spell_.json(tree.get());
  }

  Ref backward_name(const Followed& call) const {
    PyObject* const backward = literal<".backward">();
    return joined(*call.api, call.number, backward);
  }

  void gap_of_backward(const Followed& call) const {
    PyObject* const method = word<"gap">();
    if (!PyErr_ExceptionMatches(PyExc_Exception)) throw python_error();
    Ref error = taken();
    Ref name = backward_name(call);
    must(PyObject_CallMethodObjArgs(python_.tape.get(), method, name.get(), error.get(), nullptr));
  }

  // -- What Python goes on with --------------------------------------------------------------

  static Ref joined(const Api& api, long long number, PyObject* after) {
    if (!api.is_ascii) {
      return must(PyUnicode_FromFormat("%U%lld%U", api.before.get(), number, after));
    }
    char digits[24];
    const size_t n = std::to_chars(digits, digits + sizeof digits, number).ptr - digits;
    const size_t before_n = PyUnicode_GET_LENGTH(api.before.get());
    const size_t after_n = PyUnicode_GET_LENGTH(after);
    Ref name = must(PyUnicode_New(before_n + n + after_n, 127));
    auto* data = PyUnicode_1BYTE_DATA(name.get());
    memcpy(data, PyUnicode_1BYTE_DATA(api.before.get()), before_n);
    memcpy(data + before_n, digits, n);
    memcpy(data + before_n + n, PyUnicode_1BYTE_DATA(after), after_n);
    return name;
  }
  static Ref name_of(const Api& api, long long number) {
    return joined(api, number, api.after.get());
  }
  static Ref name_of(const Open& open) { return name_of(*open.api, open.number); }

  const Ref& names_of(Open& open) const {
    if (!open.names) {
      Ref name = name_of(open);
      PyObject* given[] = {open.api->api.get(), name.get(), open.module.get()};
      open.names = must(PyObject_Vectorcall(python_.call_names.get(), given, 3, nullptr));
    }
    return open.names;
  }

  const Ref& edges_object(Open& open) const {
    if (!open.edges_object) {
      open.edges_object = must(box_edges_(std::move(open.own_edges)));
    }
    return open.edges_object;
  }

  Ref open_call(Open& open) const {
    Ref inputs = must(PyList_New(0)), versions = must(PyList_New(0));
    for (const Input& input : open.inputs) {
      Ref item = must(PyTuple_Pack(2, input.tensor.get(), input.path.get()));
      Ref version = must(PyLong_FromLongLong(input.version));
      if (PyList_Append(inputs.get(), item.get()) < 0) throw python_error();
      if (PyList_Append(versions.get(), version.get()) < 0) throw python_error();
    }
    Ref id = must(PyLong_FromLongLong(open.id));
    PyObject* edges = open.edges == nullptr ? Py_None : edges_object(open).get();
    PyObject* given[] = {names_of(open).get(), python_.keep.get(), open.step.get(),
                         id.get(),             open.stack.get(),   edges,
                         inputs.get(),         versions.get(),     open.writes.get()};
    const size_t n_given = open.writes ? 9 : 8;  // else it has its default
    return must(PyObject_Vectorcall(python_.open_call.get(), given, n_given, nullptr));
  }

  Ref end_line(long long id, const std::string& outputs) const {
    Ref bytes = must(PyBytes_FromStringAndSize(outputs.data(), outputs.size()));
    Ref tree = must(PyObject_CallOneArg(python_.raw.get(), bytes.get()));
    Ref given = must(Py_BuildValue("{s:L,s:O}", "id", id, "outputs", tree.get()));
    Ref nothing = must(PyTuple_New(0));
    return must(PyObject_Call(python_.end_line.get(), nothing.get(), given.get()));
  }

  // What was raised becomes a gap, and the call is made without a record; false where it is no
  // trouble of recording (Ctrl-C), and goes on.
  bool gap(const Open& open) const {
    PyObject* const method = word<"gap">();
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return false;
    Ref error = taken();
    return attempt([&] {
      Ref name = name_of(open);
      must(PyObject_CallMethodObjArgs(python_.tape.get(), method, name.get(), error.get(), nullptr));
    });
  }

  bool end_failed(Open& open) const {
    PyObject* const method = word<"_end_failed">();
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return false;
    Ref error = taken();
    return attempt([&] {
      Ref call = open_call(open);
      must(PyObject_CallMethodObjArgs(python_.tape.get(), method, call.get(), error.get(), nullptr));
    });
  }

  // Write down that the call has raised what is set, which goes on.
  PyObject* raised(Open& open) const {
    PyObject* const method = word<"raised">();
    Ref error = taken();
    const bool written = attempt([&] {
      Ref call = open_call(open);
      must(PyObject_CallMethodObjArgs(python_.tape.get(), method, call.get(), error.get(), nullptr));
    });
    if (!written) {  // it goes on instead, as from an `except` of Python
      Ref other = taken();
      PyException_SetContext(other.get(), error.release());
      error = std::move(other);
    }
    PyErr_Restore(Py_NewRef(reinterpret_cast<PyObject*>(Py_TYPE(error.get()))),
                  Py_NewRef(error.get()), PyException_GetTraceback(error.get()));
    return nullptr;
  }

  bool end_in_python(Open& open, PyObject* result) const {
    PyObject* const method = word<"end">();
    return attempt([&] {
      Ref call = open_call(open);
      must(PyObject_CallMethodObjArgs(python_.tape.get(), method, call.get(), result, nullptr));
    });
  }

  static constexpr size_t MAX_STACKS = 5'000;

  Recording python_;
  Lines& lines_;
  Log& log_;
  BoxEdges box_edges_;
  Spell spell_;
  Fields tape_, counter_;
  const LineForm call_form_, end_form_, stack_form_;
  Spoken module_text_, parent_text_;
  std::unordered_map<PyObject*, std::shared_ptr<const Api>> apis_;
  std::unordered_map<PyObject*, std::pair<Ref, std::string>> words_;
  std::unordered_map<long long, Ref> stack_lines_;  // by the stack's number
};

}  // namespace tensorprobe
