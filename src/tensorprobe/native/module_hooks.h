// Calls of modules: what `follow.module_hooks.ModuleHooks`, `record.module_calls.ModuleCalls` and,
// of module calls, `Tape.begin` and `Tape.end` do as a rule. All through Python's own objects, without its frames.
#pragma once

#include <c10/core/GradMode.h>

#include <memory>
#include <unordered_map>

#include "making.h"
#include "stacks.h"

namespace tensorprobe {

// Python's side: `ModuleCalls.attach` says what each is.
struct ModuleCalls {
  Ref hooks, calls, tape, place, thread, trained;
  Ref compiler, call_impl;
  Ref entered, left, describe, failed, note_buffers;
  Ref entry, call_names, count;
  bool records = false, stacks = false;
  // Of calls that are written down here, and not by `Tape.begin`; `keep` is None where none is.
  Ref keep, lines, named, results, versions, edges, writer, open_call, call_line, end_line;
  Ref way, ways, output_spots, no_aliases;
  Ref is_autocast, graph_task, state_notes, functions_of, encode, traced, end_failed;
  Ref new_stack, only_path;
  StackTable stack_table;
  Ref wants_input, wants_output, wants_parameters;
  bool config_stacks = false, backward = false, sees_functions = false;
};

class Hooks {
 public:
  explicit Hooks(ModuleCalls python) : python_(std::move(python)) {}

  // A module is called, by torch's `frame`.
  PyObject* enter(PyObject* module, PyObject* args, PyObject* frame) {
    TORCH_CHECK(python_.hooks, APART);
    bool is_done = false;
    if (!attempt([&] { is_done = entered(module, args, frame); })) return fail(module);
    if (is_done) Py_RETURN_NONE;
    PyObject* given[] = {module, args, frame};
    return PyObject_Vectorcall(python_.entered.get(), given, 3, nullptr);
  }

  // A module has returned `result`, or raised.
  PyObject* leave(PyObject* module, PyObject* result, PyObject* frame) {
    TORCH_CHECK(python_.hooks, APART);
    bool is_done = false;
    if (!attempt([&] { is_done = left(module, result, frame); })) return fail(module);
    if (is_done) Py_RETURN_NONE;
    PyObject* given[] = {module, result, frame};
    return PyObject_Vectorcall(python_.left.get(), given, 3, nullptr);
  }

  int traverse(visitproc visit, void* arg) const {
    const ModuleCalls& p = python_;
    for (const Ref* ref :
         {&p.hooks, &p.calls, &p.tape, &p.place, &p.thread, &p.trained, &p.entered, &p.left, &p.describe,
          &p.failed, &p.note_buffers, &p.lines, &p.named, &p.results, &p.writer, &p.functions_of, &p.traced,
          &p.end_failed, &p.new_stack}) {
      if (int stop = ref->visit(visit, arg)) return stop;
    }
    if (int stop = p.stack_table.traverse(visit, arg)) return stop;
    for (const auto& [module, card] : cards_) {
      for (const Ref* ref : {&card->reference, &card->kind}) {
        if (int stop = ref->visit(visit, arg)) return stop;
      }
      if (!card->made) continue;
      if (int stop = card->made->traverse(visit, arg)) return stop;
    }
    return 0;
  }
  void let_go() {
    const auto cards = std::exchange(cards_, {});
    const ModuleCalls gone = std::exchange(python_, ModuleCalls());
  }

 private:
  // What stays the same of a module for as long as it lives.
  struct Card {
    Ref reference, kind, path, api;
    Ref counted_as, before, after;  // in the table of counts; around the number of a call's name
    std::unique_ptr<Made> made;
    bool is_noted = false;  // made after Python had noted how it was made
  };

  static constexpr size_t MAX_CARDS = 20'000;  // modules made anew for every call

  // -- Python's objects ----------------------------------------------------------------------

  static void set(const Ref& object, PyObject* name, PyObject* value) {
    if (PyObject_SetAttr(object.get(), name, value) < 0) throw python_error();
  }
  static void put(const Ref& dict, PyObject* name, PyObject* value) {
    if (PyDict_SetItem(dict.get(), name, value) < 0) throw python_error();
  }
  // Of a dict, held; none where it is not there.
  static Ref item(PyObject* dict, PyObject* name) {
    PyObject* found = PyDict_GetItemWithError(dict, name);
    if (found == nullptr && PyErr_Occurred()) throw python_error();
    return Ref::borrow(found);
  }
  template <typename... Given>
  static Ref called(const Ref& function, Given... given) {
    PyObject* arguments[] = {given...};
    return must(PyObject_Vectorcall(function.get(), arguments, sizeof...(given), nullptr));
  }

  // What was raised becomes a gap, unless it is no trouble of recording (Ctrl-C): it goes on.
  PyObject* fail(PyObject* module) const {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return nullptr;
    const Ref error = taken();
    PyObject* given[] = {module, error.get()};
    return PyObject_Vectorcall(python_.failed.get(), given, 2, nullptr);
  }

  PyTypeObject* entry_type() const { return reinterpret_cast<PyTypeObject*>(python_.entry.get()); }

  // False where Python is to do it, and nothing was done.
  bool entered(PyObject* module, PyObject* args, PyObject* torchs_frame) {
    if (is_compiling()) return true;
    const Ref entries = attribute<"entries">(python_.thread);
    if (!PyList_CheckExact(entries.get()) || PyList_GET_SIZE(entries.get()) == 0) {
      return false;  // it begins a step, perhaps
    }
    const Ref frame = Ref::borrow(torchs_frame);
    const Ref last =
        Ref::borrow(PyList_GET_ITEM(entries.get(), PyList_GET_SIZE(entries.get()) - 1));
    if (!is_below(attribute<"frame">(last), frame)) return false;
    if (attribute<"recording">(python_.tape).get() != Py_True) return true;
    if (attribute<"around">(python_.hooks).get() != Py_None ||
        attribute<"only">(python_.tape).get() != Py_None) {
      return false;
    }
    const std::shared_ptr<const Card> card = card_of(module);
    if (!card || !PyTuple_CheckExact(args)) return false;
    const Ref held = must(PyObject_GenericGetDict(module, nullptr));
    if (!has_usual(held.get())) return false;
    follow(*card, module, args, entries, last, frame, held);
    return true;
  }

  bool left(PyObject* module, PyObject* result, PyObject* frame) {
    if (is_compiling()) return true;
    const Ref entries = attribute<"entries">(python_.thread);
    if (!PyList_CheckExact(entries.get())) return false;
    const Py_ssize_t count = PyList_GET_SIZE(entries.get());
    if (count == 0) return true;
    const Ref entry = Ref::borrow(PyList_GET_ITEM(entries.get(), count - 1));
    // the outermost, one that was entered before the recording began, or that has raised
    if (count == 1 || Py_TYPE(entry.get()) != entry_type() ||
        attribute<"module">(entry).get() != module || has_raised(frame)) {
      return false;
    }
    if (PyList_SetSlice(entries.get(), count - 1, count, nullptr) < 0) throw python_error();
    const Ref place = attribute<"__dict__">(python_.place);
    if (PyDict_Update(place.get(), attribute<"place">(entry).get()) < 0) throw python_error();
    const Ref call = attribute<"call">(entry);
    if (call.get() != Py_None) end(entry, call, module, result);
    return true;
  }

  // -- Where we are --------------------------------------------------------------------------

  bool is_compiling() const {  // as torch.compiler.is_compiling
    PyObject* found = PyDict_GetItemWithError(python_.compiler.get(), word<"_is_compiling_flag">());
    if (found == Py_False) return false;
    if (PyErr_Occurred()) throw python_error();
    const Ref said =
        must(PyObject_CallNoArgs(item(python_.compiler.get(), word<"is_compiling">()).get()));
    return said.get() == Py_True;
  }

  // Whether torch calls from where it does so for a module that has raised.
  bool has_raised(PyObject* frame) const {
    auto* object = reinterpret_cast<PyFrameObject*>(frame);
    const Ref code = Ref::steal(reinterpret_cast<PyObject*>(PyFrame_GetCode(object)));
    return code.get() == python_.call_impl.get();
  }

  static bool is_below(const Ref& outer, Ref frame) {
    while (frame && frame.get() != outer.get()) frame = back(frame);
    return static_cast<bool>(frame);
  }

  // The keyword arguments of the call: this very dict, to which others may write.
  static Ref kwargs_in(const Ref& frame) {
#if PY_VERSION_HEX >= 0x030C0000
    Ref found = Ref::steal(PyFrame_GetVar(reinterpret_cast<PyFrameObject*>(frame.get()),
                                          word<"kwargs">()));
    if (!found) {
      if (!PyErr_ExceptionMatches(PyExc_NameError)) throw python_error();
      PyErr_Clear();
    }
    return found;
#else
    const Ref locals = attribute<"f_locals">(frame);
    return item(locals.get(), word<"kwargs">());
#endif
  }

  // -- Modules -------------------------------------------------------------------------------

  static PyObject* referent(const Ref& reference) {  // borrowed: the caller has the module
#if PY_VERSION_HEX >= 0x030D0000
    PyObject* found = nullptr;
    if (PyWeakref_GetRef(reference.get(), &found) < 0) throw python_error();
    Py_XDECREF(found);
    return found;
#else
    return PyWeakref_GetObject(reference.get());
#endif
  }

  // None where Python is to do it.
  std::shared_ptr<const Card> card_of(PyObject* module) {
    auto found = cards_.find(module);
    if (found != cards_.end()) {
      const std::shared_ptr<const Card> known = found->second;
      const bool is_its = referent(known->reference) == module;
      if (is_its && known->kind.get() == reinterpret_cast<PyObject*>(Py_TYPE(module))) return known;
    }
    return new_card(module);
  }

  std::shared_ptr<const Card> new_card(PyObject* module, bool is_noted = false) {
    const Ref described = called(python_.describe, module);
    if (described.get() == Py_None) {
      cards_.erase(module);
      return nullptr;
    }
    PyObject *reference, *path, *api, *counted_as, *before, *after, *made;
    if (!PyArg_ParseTuple(described.get(), "OUOOUUO", &reference, &path, &api, &counted_as, &before,
                          &after, &made)) {
      throw python_error();
    }
    TORCH_CHECK(PyWeakref_CheckRef(reference), "a module comes as a reference");
    auto card = std::make_shared<Card>();
    card->is_noted = is_noted;
    card->reference = Ref::borrow(reference);
    card->kind = Ref::borrow(reinterpret_cast<PyObject*>(Py_TYPE(module)));
    card->path = Ref::borrow(path);
    card->api = Ref::borrow(api);
    card->counted_as = Ref::borrow(counted_as);
    card->before = Ref::borrow(before);
    card->after = Ref::borrow(after);
    if (made != Py_None) card->made = std::make_unique<Made>(made);
    if (cards_.size() >= MAX_CARDS) const auto gone = std::exchange(cards_, {});
    const std::shared_ptr<const Card> old = std::exchange(cards_[module], card);
    return card;
  }

  static bool has_usual(PyObject* held) {
    for (PyObject* name : {word<"_parameters">(), word<"_buffers">()}) {
      PyObject* found = PyDict_GetItemWithError(held, name);
      if (found == nullptr || !PyDict_CheckExact(found)) return false;
    }
    PyObject* compiled = PyDict_GetItemWithError(held, word<"_compiled_call_impl">());
    return compiled == nullptr || compiled == Py_None;
  }

  // [(name, tensor)] of those that are not None; none where there are none.
  static Ref present(PyObject* held, PyObject* section) {
    const Ref dict = item(held, section);
    Ref list;
    if (!dict || !PyDict_CheckExact(dict.get())) return list;  // another's since `has_usual`
    PyObject *name, *tensor;
    Py_ssize_t at = 0;
    while (PyDict_Next(dict.get(), &at, &name, &tensor)) {
      if (tensor == Py_None) continue;
      const Ref key = Ref::borrow(name), value = Ref::borrow(tensor);  // what is made may free them
      if (!list) list = must(PyList_New(0));
      const Ref pair = must(PyTuple_Pack(2, key.get(), value.get()));
      if (PyList_Append(list.get(), pair.get()) < 0) throw python_error();
    }
    return list;
  }

  // -- The beginning -------------------------------------------------------------------------

  // As `ModuleHooks.entered`, of a module inside of another that is recorded.
  void follow(const Card& card, PyObject* module, PyObject* args, const Ref& entries,
              const Ref& last, const Ref& frame, const Ref& held) {
    const Ref place = attribute<"__dict__">(python_.place);
    TORCH_CHECK(PyDict_Check(place.get()), "a place is a dict");
    const Ref before = must(PyDict_Copy(place.get()));
    const Ref leaves = attribute<"leaves">(last);
    const Ref entry =
        called(python_.entry, module, frame.get(), before.get(), leaves.get());
    if (PyList_Append(entries.get(), entry.get()) < 0) throw python_error();
    Ref call;
    if (python_.records) call = begin(card, module, args, entry, place, frame, held);
    put(place, word<"module">(), card.path.get());
    if (!python_.stacks || attribute<"recording">(python_.tape).get() != Py_True) return;
    Ref stack;
    if (call) {
      stack = attribute<"stack">(call);
      if (PyObject_IsTrue(stack.get()) != 1) stack = Ref();
    }
    if (!stack) {
      stack = method<"stack_number">(python_.tape, frame.get());
    }
    put(place, word<"stack">(), stack.get());
    put(place, word<"frame">(), frame.get());
  }

  // As `ModuleCalls._begin`; what the tape has begun, or none.
  Ref begin(const Card& card, PyObject* module, PyObject* args, const Ref& entry,
            const Ref& place, const Ref& frame, const Ref& held) {
    const bool everything = attribute<"everything">(python_.tape).get() == Py_True;
    const Ref name = next_name(card);
    const Ref names =
        everything ? called(python_.call_names, card.api.get(), name.get(), card.path.get())
                   : method<"select">(python_.tape, card.api.get(), name.get(),
                                   card.path.get());
    if (names.get() == Py_None) return Ref();
    const Ref parameters = present(held.get(), word<"_parameters">());
    const Ref buffers = present(held.get(), word<"_buffers">());
    const Ref kwargs = kwargs_in(frame);
    const bool grad =
        c10::GradMode::is_enabled() && at::functorch::getDynamicLayerStack().empty();
    const bool wanted = everything || attribute<"wanted">(names).get() == Py_True;
    Ref call;
    if (wanted && is_plain_tape(kwargs)) {
      Started started{names, name, grad, parameters, buffers};
      const bool done =
          attempt([&] { call = write_call(started, card, args, kwargs, place, frame); });
      if (!done) {
        if (!PyErr_ExceptionMatches(PyExc_Exception)) throw python_error();
        const Ref error = taken();
        method<"gap">(python_.tape, name.get(), error.get());
        call = Ref();
      }
    } else {
      call = begin_in_python(names, args, kwargs, frame, grad, held, parameters, buffers);
    }
    if (wanted) put(place, word<"parent">(), name.get());
    if (!call) return call;
    set(entry, word<"call">(), call.get());
    const Ref edges = attribute<"edges">(call);
    if (edges.get() != Py_None && attribute<"has_leaves">(edges).get() == Py_True) {
      set(entry, word<"leaves">(), Py_True);
    }
    if (buffers) called(python_.note_buffers, call.get(), buffers.get());
    add_notes(card, module, held, call);
    if (parameters) {
      const Ref id = must(PyLong_FromVoidPtr(module));
      const Ref thread = must(PyLong_FromUnsignedLong(PyThread_get_thread_ident()));
      const Ref trained =
          must(PyTuple_Pack(3, card.reference.get(), card.path.get(), thread.get()));
      put(python_.trained, id.get(), trained.get());
    }
    return call;
  }

  // As `follow.naming.Counter.next_name`, and its `_new`: most modules are called once in a step.
  Ref next_name(const Card& card) const {
    const Ref counter = attribute<"counter">(python_.tape);
    const Ref by_api = attribute<"_by_api">(counter);
    Ref known = item(by_api.get(), card.api.get());
    if (!known) {
      const Ref counts = attribute<"_counts">(counter);
      const Ref fresh = must(PyObject_CallNoArgs(python_.count.get()));
      PyObject* stays = PyDict_SetDefault(counts.get(), card.counted_as.get(), fresh.get());
      if (stays == nullptr) throw python_error();
      known = must(PyTuple_Pack(3, stays, card.before.get(), card.after.get()));
      put(by_api, card.api.get(), known.get());
    }
    TORCH_CHECK(PyTuple_CheckExact(known.get()) && PyTuple_GET_SIZE(known.get()) == 3, "no count");
    const Ref number = must(PyIter_Next(PyTuple_GET_ITEM(known.get(), 0)));
    return must(PyUnicode_FromFormat("%U%S%U", card.before.get(), number.get(), card.after.get()));
  }

  Ref begin_in_python(const Ref& names, PyObject* args, const Ref& kwargs, const Ref& frame,
                      bool grad, const Ref& held, const Ref& parameters, const Ref& buffers) const {
    const Ref given = must(PyDict_New());
    const Ref training = item(held.get(), word<"training">());
    put(given, word<"frame">(), frame.get());
    put(given, literal<"grad">(), grad ? Py_True : Py_False);
    put(given, literal<"random">(), training ? training.get() : Py_False);
    if (parameters) put(given, word<"parameters">(), parameters.get());
    if (buffers) put(given, word<"buffers">(), buffers.get());
    const Ref positional =
        must(PyTuple_Pack(3, names.get(), args, kwargs ? kwargs.get() : Py_None));
    const Ref begin = attribute<"begin">(python_.tape);
    Ref call = must(PyObject_Call(begin.get(), positional.get(), given.get()));
    return call.get() == Py_None ? Ref() : call;
  }

  void add_notes(const Card& card, PyObject* module, const Ref& held, const Ref& call) {
    const Ref notes = attribute<"notes">(call);
    TORCH_CHECK(PyList_CheckExact(notes.get()), "notes are a list");
    Ref made;
    if (card.made && card.made->holds_for(held.get())) {
      made = Ref::borrow(card.made->notes());
    } else {
      const Ref known = attribute<"_made">(python_.calls);
      made = method<"of">(known, module);
      if (card.made || !card.is_noted) new_card(module, true);  // with the notes it has now
    }
    const Py_ssize_t end = PyList_GET_SIZE(notes.get());
    if (PyList_SetSlice(notes.get(), end, end, made.get()) < 0) throw python_error();
  }

  // -- Writing it down -----------------------------------------------------------------------

  struct Started {
    Ref names, name;
    bool grad;
    Ref parameters, buffers;
  };

  // Whether `Tape.begin` would do no more than `write_call` does.
  bool is_plain_tape(const Ref& kwargs) const {
    if (python_.keep.get() == Py_None) return false;
    if (kwargs && kwargs.get() != Py_None && !PyDict_CheckExact(kwargs.get())) return false;
    if (attribute<"is_open">(python_.tape).get() != Py_True) return false;
    const Ref pending = attribute<"_unfinished">(python_.tape);
    return PyList_CheckExact(pending.get()) && PyList_GET_SIZE(pending.get()) == 0;
  }

  // As `Tape.begin`.
  Ref write_call(const Started& started, const Card& card, PyObject* args, Ref kwargs,
                 const Ref& place, const Ref& frame) {
    if (!kwargs || kwargs.get() == Py_None) kwargs = must(PyDict_New());
    const Ref step = attribute<"step">(python_.tape);
    const Ref call =
        called(python_.open_call, started.names.get(), python_.keep.get(), step.get());
    Ref stack = Ref::borrow(Py_None);
    if (python_.config_stacks) {
      stack = stack_number(place, frame);
      set(call, word<"stack">(), stack.get());
    }
    const FunctionsOff off;
    const Ref trees = method<"arguments">(python_.lines, call.get(), args,
                                    kwargs.get(), python_.wants_input.get());
    PyObject *positional, *keywords;
    if (!PyArg_ParseTuple(trees.get(), "OO", &positional, &keywords)) throw python_error();
    const Ref inputs = attribute<"inputs">(call);
    set(call, word<"versions">(), called(python_.versions, inputs.get()).get());
    const Ref zero = must(PyLong_FromLong(0));
    const Ref op = attribute<"op">(card.api);
    const Ref parent = item(place.get(), word<"parent">()), thread = item(place.get(), word<"thread">());
    TORCH_CHECK(parent && thread, "nobody knows where this is");
    PyObject* given[] = {zero.get(),       started.name.get(), op.get(),   card.path.get(),
                         thread.get(),     parent.get(),       stack.get(), positional,
                         keywords};
    static PyObject* const keys =
        Py_BuildValue("(sssssssss)", "id", "name", "op", "module", "thread", "parent", "stack",
                      "args", "kwargs");
    const Ref line = must(PyObject_Vectorcall(python_.call_line.get(), given, 0, keys));
    if (has_state_notes()) {
      const Ref notes = called(python_.state_notes, started.grad ? Py_True : Py_False);
      set(line, word<"notes">(), notes.get());
    }
    if (started.parameters) {
      const Ref held = called(python_.named, started.parameters.get(), call.get(),
                              literal<"parameter">(), python_.wants_parameters.get());
      set(line, word<"parameters">(), held.get());
    }
    if (started.buffers) {
      const Ref held = method<"_named">(python_.tape, call.get(), word<"buffers">(),
                                     started.buffers.get());
      set(line, word<"buffers">(), held.get());
    }
    if (started.grad) {
      const Ref edges = called(python_.edges, inputs.get());
      set(call, word<"edges">(), edges.get());
      if (python_.sees_functions && attribute<"has_functions">(edges).get() == Py_True) {
        called(python_.functions_of, edges.get());
      }
    }
    const Ref id = must(PyIter_Next(attribute<"ids">(python_.tape).get()));
    set(call, word<"id">(), id.get());
    set(line, word<"id">(), id.get());
    method<"call">(python_.writer, line.get());
    return call;
  }

  bool has_state_notes() const {
    if (PyObject_IsTrue(must(PyObject_CallNoArgs(python_.is_autocast.get())).get()) == 1) return true;
    const Ref task = must(PyObject_CallNoArgs(python_.graph_task.get()));
    return PyLong_AsLong(task.get()) != -1;
  }

  Ref stack_number(const Ref& place, const Ref& frame) const {
    return python_.stack_table.number(place.get(), frame, [&](const Ref& number, const Ref& frames) {
      called(python_.new_stack, number.get(), frames.get());
      return true;
    });
  }

  // -- The end -------------------------------------------------------------------------------

  // As `ModuleCalls.leave` and `Tape.end`.
  void end(const Ref& entry, const Ref& call, PyObject* module, PyObject* result) {
    const Ref held = must(PyObject_GenericGetDict(module, nullptr));
    const Ref buffers = item(held.get(), word<"_buffers">());
    bool is_written = false;
    if (python_.keep.get() != Py_None && buffers && PyDict_CheckExact(buffers.get()) &&
        PyDict_GET_SIZE(buffers.get()) == 0) {
      const bool done = attempt([&] { is_written = write_end(entry, call, result); });
      if (!done) {
        if (!PyErr_ExceptionMatches(PyExc_Exception)) throw python_error();
        const Ref error = taken();
        called(python_.end_failed, call.get(), error.get());
        return;
      }
    }
    if (!is_written) {
      method<"leave">(python_.calls, entry.get(), call.get(), result, Py_None);
    }
  }

  // False where there is more to it, and nothing was done.
  bool write_end(const Ref& entry, const Ref& call, PyObject* result) {
    const FunctionsOff off;
    const Ref id = attribute<"id">(call);
    const Ref inputs = attribute<"inputs">(call);
    const Ref versions = called(python_.versions, inputs.get());
    const Ref before = attribute<"versions">(call);
    const int same = PyObject_RichCompareBool(versions.get(), before.get(), Py_EQ);
    if (same < 0) throw python_error();
    if (same == 0 || PyLong_AsLong(id.get()) < 0 || attribute<"draws">(call).get() != Py_None ||
        PyObject_IsTrue(attribute<"writes">(call).get()) != 0) {
      return false;
    }
    const Ref outputs = must(PyList_New(0));
    Ref tree;
    if (is_own_type(result)) {
      const Ref pair = must(PyTuple_Pack(2, result, python_.only_path.get()));
      if (PyList_Append(outputs.get(), pair.get()) < 0) throw python_error();
      tree = method<"encoded">(python_.lines, result, call.get(), literal<"output">(),
                           python_.only_path.get(), python_.wants_output.get());
    } else {
      tree = called(python_.results, result, call.get(), python_.wants_output.get(), outputs.get());
    }
    if (result != Py_None && tree.get() == Py_None) {  // it is something else
      const Ref seen = must(PyDict_New());
      const Ref encoder =
          method<"encoder">(python_.lines, call.get(), literal<"output">(),
                        python_.wants_output.get(), outputs.get(), seen.get());
      tree = called(python_.encode, result, encoder.get());
    }
    const Ref notes = attribute<"notes">(call);
    PyObject* given[] = {id.get(), tree.get(), notes.get()};
    static PyObject* const keys = Py_BuildValue("(sss)", "id", "outputs", "notes");
    const Ref line = must(PyObject_Vectorcall(python_.end_line.get(), given, 0, keys));
    const Ref edges = attribute<"edges">(call);
    if (python_.backward && edges.get() != Py_None) trace(entry, call, edges, outputs);
    method<"end">(python_.writer, line.get());
    return true;
  }

  // As `Tape._trace` by `trace_module`.
  void trace(const Ref& entry, const Ref& call, const Ref& edges, const Ref& outputs) {
    const Ref owners = attribute<"owners">(python_.thread);
    const Ref leaves = attribute<"leaves">(entry);
    Ref found = Ref::borrow(Py_None);
    if (is_only(outputs)) {
      PyObject* output = PyTuple_GET_ITEM(PyList_GET_ITEM(outputs.get(), 0), 0);
      found = method<"only">(owners, edges.get(), output, leaves.get(), Py_True);
      const Py_ssize_t count = PyTuple_CheckExact(found.get()) ? PyTuple_GET_SIZE(found.get()) : 0;
      if (count == 1 || count == 3) {
        listen(call, edges, found.get());
        return;
      }
    }
    called(python_.traced, call.get(), edges.get(), outputs.get(), owners.get(), leaves.get(),
           found.get());
  }

  // To the ways that the edges keep: the spots of the only one, or what is to be said of several.
  void listen(const Ref& call, const Ref& edges, PyObject* found) const {
    PyObject* tape = python_.tape.get();
    PyObject* first = PyTuple_GET_ITEM(found, 0);
    const Ref names = attribute<"names">(call), keep = attribute<"keep">(call);
    const Ref stack = attribute<"stack">(call), step = attribute<"step">(call);
    if (PyTuple_GET_SIZE(found) == 1) {
      const Ref way =
          called(python_.way, tape, names.get(), keep.get(), stack.get(), step.get(), first);
      method<"listen">(edges, way.get());
    } else {
      const Ref ways =
          called(python_.ways, tape, names.get(), keep.get(), stack.get(), step.get(), first,
                 PyTuple_GET_ITEM(found, 1), python_.no_aliases.get());
      method<"listen">(edges, ways.get(), python_.output_spots.get());
    }
  }

  bool is_only(const Ref& outputs) const {  // as `follow.gradients._is_only`
    if (PyList_GET_SIZE(outputs.get()) != 1) return false;
    PyObject* pair = PyList_GET_ITEM(outputs.get(), 0);
    TORCH_CHECK(PyTuple_CheckExact(pair) && PyTuple_GET_SIZE(pair) == 2, "not an output");
    PyObject* path = PyTuple_GET_ITEM(pair, 1);
    if (path == python_.only_path.get()) return true;
    return PyObject_RichCompareBool(path, python_.only_path.get(), Py_EQ) == 1;
  }

  ModuleCalls python_;
  std::unordered_map<PyObject*, std::shared_ptr<const Card>> cards_;
};

}  // namespace tensorprobe
