// The module `tensorprobe_native`: parts of the recorder of which every call needs some, against
// the insides of torch. Each does what a class in Python does, for the tensors that most are; the
// docs (design.md) say which. Built by build.py for one version of torch and Python.

#include <memory>

#include "calls.h"
#include "values.h"
#include "module_hooks.h"
#include "tensor_lines.h"
#include "writer.h"
#include "regions.h"
#include "every_call.h"
#include "stacks.h"
#include "backends.h"

namespace tensorprobe {
namespace {

// A Python object around one of C++.
template <typename Held>
struct Box {
  PyObject_HEAD
  Held* held;
};

template <typename Held>
Held& in(PyObject* self) {
  return *reinterpret_cast<Box<Held>*>(self)->held;
}

template <typename Held>
PyObject* boxed(PyTypeObject* type, std::unique_ptr<Held> held) {
  PyObject* self = type->tp_alloc(type, 0);
  if (self != nullptr) reinterpret_cast<Box<Held>*>(self)->held = held.release();
  return self;
}

template <typename Held>
void unbox(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  if (PyType_IS_GC(type)) PyObject_GC_UnTrack(self);
  delete reinterpret_cast<Box<Held>*>(self)->held;
  type->tp_free(self);
  Py_DECREF(type);
}

template <typename Held>
int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Held* held = reinterpret_cast<Box<Held>*>(self)->held;
  return held == nullptr ? 0 : held->traverse(visit, arg);
}

template <typename Held>
int clear(PyObject* self) {
  Held* held = reinterpret_cast<Box<Held>*>(self)->held;
  if (held != nullptr) held->let_go();
  return 0;
}

bool takes(const char* name, Py_ssize_t count, Py_ssize_t least, Py_ssize_t most) {
  if (count >= least && count <= most) return true;
  PyErr_Format(PyExc_TypeError, "%s takes %zd to %zd arguments, not %zd", name, least, most, count);
  return false;
}

using Arguments = PyObject* const*;

// -- Contents --------------------------------------------------------------------------------

PyObject* new_contents(PyTypeObject* type, PyObject* args, PyObject*) {
  return guarded([&]() -> PyObject* {
    PyObject *otherwise, *forget, *make, *submit, *value, *marks, *lent;
    if (!PyArg_ParseTuple(args, "OOOOOO!O", &otherwise, &forget, &make, &submit, &value,
                          &PyDict_Type, &marks, &lent)) {
      return nullptr;
    }
    return boxed(type, std::make_unique<Contents>(Ref::borrow(otherwise), Ref::borrow(forget),
                                                  Ref::borrow(make), Ref::borrow(submit),
                                                  Ref::borrow(value), Ref::borrow(marks),
                                                  Ref::borrow(lent)));
  });
}

PyObject* contents_of(PyObject* self, Arguments args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    if (!takes("of", count, 6, 6)) return nullptr;
    return in<Contents>(self).of(args[0], args[1], args[2], args[3], args[4], args[5]);
  });
}

PyObject* contents_forget(PyObject* self, PyObject* tensor) {
  return guarded([&] { return in<Contents>(self).forget(tensor); });
}

PyObject* contents_lend(PyObject* self, PyObject* tensor) {
  return guarded([&] { return in<Contents>(self).lend(tensor); });
}

PyObject* contents_begin(PyObject* self, PyObject* ids) {
  return guarded([&]() -> PyObject* {
    in<Contents>(self).begin(ids);
    Py_RETURN_NONE;
  });
}

PyObject* contents_watch_writes(PyObject* self, PyObject* on) {
  return guarded([&]() -> PyObject* {
    in<Contents>(self).watch_writes(on == Py_True);
    Py_RETURN_NONE;
  });
}

PyObject* contents_saw_scaler(PyObject* self, PyObject*) {
  return PyBool_FromLong(in<Contents>(self).saw_scaler());
}

PyObject* contents_hold(PyObject* self, Arguments args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    if (!takes("hold", count, 2, 2)) return nullptr;
    if (!is_tensor(args[0])) return PyErr_Format(PyExc_TypeError, "hold takes a tensor");
    in<Contents>(self).hold(args[0], args[1] == Py_True);
    Py_RETURN_NONE;
  });
}

PyMethodDef contents_methods[] = {
    {"saw_scaler", contents_saw_scaler, METH_NOARGS, nullptr},
    {"watch_writes", contents_watch_writes, METH_O, nullptr},
    {"of", reinterpret_cast<PyCFunction>(contents_of), METH_FASTCALL, nullptr},
    {"forget", contents_forget, METH_O, nullptr},
    {"lend", contents_lend, METH_O, nullptr},
    {"hold", reinterpret_cast<PyCFunction>(contents_hold), METH_FASTCALL, nullptr},
    {"begin_step", contents_begin, METH_O, nullptr},
    {nullptr}};

PyType_Slot contents_slots[] = {{Py_tp_new, reinterpret_cast<void*>(new_contents)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(unbox<Contents>)},
                                {Py_tp_traverse, reinterpret_cast<void*>(traverse<Contents>)},
                                {Py_tp_clear, reinterpret_cast<void*>(clear<Contents>)},
                                {Py_tp_methods, contents_methods},
                                {0, nullptr}};

PyType_Spec contents_spec = {"tensorprobe_native.Contents", sizeof(Box<Contents>), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, contents_slots};
PyTypeObject* contents_type = nullptr;

// -- Lines -----------------------------------------------------------------------------------

PyObject* new_lines(PyTypeObject* type, PyObject* args, PyObject*) {
  return guarded([&]() -> PyObject* {
    PyObject *contents, *raw, *head, *encoded, *repeated, *encoder, *tree, *atoms, *positions;
    Py_ssize_t max_text;
    if (!PyArg_ParseTuple(args, "O!OOOOOOO!O!n", contents_type, &contents, &raw, &head, &encoded,
                          &repeated, &encoder, &tree, &PyDict_Type, &atoms, &PyList_Type,
                          &positions, &max_text)) {
      return nullptr;
    }
    Callbacks callbacks{Ref::borrow(raw),      Ref::borrow(head),    Ref::borrow(encoded),
                        Ref::borrow(repeated), Ref::borrow(encoder), Ref::borrow(tree),
                        Ref::borrow(atoms),    Ref::borrow(positions), max_text};
    return boxed(type, std::make_unique<Lines>(Ref::borrow(contents), in<Contents>(contents),
                                               std::move(callbacks)));
  });
}

PyObject* lines_encoded(PyObject* self, Arguments args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    if (!takes("encoded", count, 5, 6)) return nullptr;
    PyObject* grad = count > 5 ? args[5] : Py_None;
    return in<Lines>(self).encoded(args[0], args[1], args[2], args[3], args[4], grad);
  });
}

PyObject* lines_arguments(PyObject* self, Arguments args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    if (!takes("arguments", count, 4, 4)) return nullptr;
    if (!PyDict_Check(args[2])) {
      PyErr_SetString(PyExc_TypeError, "keyword arguments come as a dict");
      return nullptr;
    }
    return in<Lines>(self).arguments(args[0], args[1], args[2], args[3]);
  });
}

PyObject* lines_named(PyObject* self, Arguments args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    if (!takes("named", count, 4, 4)) return nullptr;
    return in<Lines>(self).named(args[0], args[1], args[2], args[3]);
  });
}

PyObject* lines_results(PyObject* self, Arguments args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    if (!takes("results", count, 4, 4)) return nullptr;
    if (!PyList_CheckExact(args[3])) {
      PyErr_SetString(PyExc_TypeError, "tensors are added to a list");
      return nullptr;
    }
    return in<Lines>(self).results(args[0], args[1], args[2], args[3]);
  });
}

PyMethodDef lines_methods[] = {
    {"encoded", reinterpret_cast<PyCFunction>(lines_encoded), METH_FASTCALL, nullptr},
    {"arguments", reinterpret_cast<PyCFunction>(lines_arguments), METH_FASTCALL, nullptr},
    {"named", reinterpret_cast<PyCFunction>(lines_named), METH_FASTCALL, nullptr},
    {"results", reinterpret_cast<PyCFunction>(lines_results), METH_FASTCALL, nullptr},
    {nullptr}};

PyType_Slot lines_slots[] = {{Py_tp_new, reinterpret_cast<void*>(new_lines)},
                             {Py_tp_dealloc, reinterpret_cast<void*>(unbox<Lines>)},
                             {Py_tp_traverse, reinterpret_cast<void*>(traverse<Lines>)},
                             {Py_tp_clear, reinterpret_cast<void*>(clear<Lines>)},
                             {Py_tp_methods, lines_methods},
                             {0, nullptr}};

PyType_Spec lines_spec = {"tensorprobe_native.Lines", sizeof(Box<Lines>), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, lines_slots};
PyTypeObject* lines_type = nullptr;

// -- Starter ---------------------------------------------------------------------------------

PyObject* new_starter(PyTypeObject* type, PyObject* args, PyObject*) {
  return guarded([&]() -> PyObject* {
    PyObject *queue, *usual_stream, *new_result, *otherwise;
    Py_ssize_t slots;
    long long rows;
    if (!PyArg_ParseTuple(args, "OOOOnL", &queue, &usual_stream, &new_result, &otherwise, &slots,
                          &rows)) {
      return nullptr;
    }
    const bool asks = PyTuple_CheckExact(usual_stream);
    if (asks && PyTuple_GET_SIZE(usual_stream) != 4) {
      PyErr_SetString(PyExc_TypeError, "CUDA is asked by four");
      return nullptr;
    }
    return boxed(type, std::make_unique<Starter>(Ref::borrow(queue), Ref::borrow(usual_stream),
                                                 Ref::borrow(new_result), Ref::borrow(otherwise),
                                                 slots, rows));
  });
}

PyObject* starter_know(PyObject* self, PyObject* args) {
  return guarded([&]() -> PyObject* {
    PyObject *form, *call, *before, *given, *after, *units, *ticket;
    long long programs;
    if (!PyArg_ParseTuple(args, "O!LOO!O!O!OO!", &PyLong_Type, &form, &programs, &call,
                          &PyTuple_Type, &before, &PyTuple_Type, &given, &PyTuple_Type, &after,
                          &units, &PyTuple_Type, &ticket)) {
      return nullptr;
    }
    Starter& starter = in<Starter>(self);
    if (!starter.know(form, programs, call, before, given, after, units, ticket)) return nullptr;
    Py_RETURN_NONE;
  });
}

PyObject* starter_forget(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    in<Starter>(self).forget();
    Py_RETURN_NONE;
  });
}

PyObject* starter_start(PyObject* self, Arguments args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    if (!takes("start", count, 1, 3)) return nullptr;
    if (!is_own_type(args[0])) {
      PyErr_SetString(PyExc_TypeError, "a tensor of torch's own type");
      return nullptr;
    }
    return in<Starter>(self).start(args[0], count > 1 ? args[1] : Py_None);
  });
}

PyMethodDef starter_methods[] = {
    {"start", reinterpret_cast<PyCFunction>(starter_start), METH_FASTCALL, nullptr},
    {"know", starter_know, METH_VARARGS, nullptr},
    {"forget", starter_forget, METH_NOARGS, nullptr},
    {nullptr}};

PyType_Slot starter_slots[] = {{Py_tp_new, reinterpret_cast<void*>(new_starter)},
                               {Py_tp_dealloc, reinterpret_cast<void*>(unbox<Starter>)},
                               {Py_tp_traverse, reinterpret_cast<void*>(traverse<Starter>)},
                               {Py_tp_clear, reinterpret_cast<void*>(clear<Starter>)},
                               {Py_tp_methods, starter_methods},
                               {0, nullptr}};

PyType_Spec starter_spec = {"tensorprobe_native.Starter", sizeof(Box<Starter>), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, starter_slots};

// -- Log -------------------------------------------------------------------------------------

PyObject* new_log(PyTypeObject* type, PyObject* args, PyObject*) {
  return guarded([&]() -> PyObject* {
    PyObject *writer, *encode, *call, *end;
    if (!PyArg_ParseTuple(args, "OOOO", &writer, &encode, &call, &end)) return nullptr;
    return boxed(type, std::make_unique<Log>(Ref::borrow(writer), Ref::borrow(encode),
                                             Ref::borrow(call), Ref::borrow(end)));
  });
}

PyObject* log_call(PyObject* self, PyObject* line) {
  return guarded([&] { return in<Log>(self).call(line); });
}

PyObject* log_end(PyObject* self, PyObject* line) {
  return guarded([&] { return in<Log>(self).end(line); });
}

PyMethodDef log_methods[] = {{"call", log_call, METH_O, nullptr},
                             {"end", log_end, METH_O, nullptr},
                             {nullptr}};

PyType_Slot log_slots[] = {{Py_tp_new, reinterpret_cast<void*>(new_log)},
                           {Py_tp_dealloc, reinterpret_cast<void*>(unbox<Log>)},
                           {Py_tp_traverse, reinterpret_cast<void*>(traverse<Log>)},
                           {Py_tp_clear, reinterpret_cast<void*>(clear<Log>)},
                           {Py_tp_methods, log_methods},
                           {0, nullptr}};

PyType_Spec log_spec = {"tensorprobe_native.Log", sizeof(Box<Log>), 0,
                        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, log_slots};
PyTypeObject* log_type = nullptr;

// -- Edges -----------------------------------------------------------------------------------

bool are_inputs(PyObject* inputs) {  // a list of (tensor, path)
  if (!PyList_CheckExact(inputs)) return false;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(inputs); ++i) {
    PyObject* item = PyList_GET_ITEM(inputs, i);
    if (!PyTuple_CheckExact(item) || PyTuple_GET_SIZE(item) != 2) return false;
    if (!PyTuple_CheckExact(PyTuple_GET_ITEM(item, 1))) return false;
  }
  return true;
}

PyObject* new_edges(PyTypeObject* type, PyObject* args, PyObject*) {
  return guarded([&]() -> PyObject* {
    PyObject* inputs;
    if (!PyArg_ParseTuple(args, "O", &inputs)) return nullptr;
    if (!are_inputs(inputs)) {
      PyErr_SetString(PyExc_TypeError, "inputs are a list of tensors and paths");
      return nullptr;
    }
    return boxed(type, std::make_unique<Edges>(inputs));
  });
}

PyObject* edges_exits_of(PyObject* self, PyObject* output) {
  return guarded([&] { return in<Edges>(self).exits_of(output); });
}

PyObject* edges_listen(PyObject* self, Arguments args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    if (!takes("listen", count, 1, 2)) return nullptr;
    in<Edges>(self).listen(args[0], count > 1 ? args[1] : Py_None);
    Py_RETURN_NONE;
  });
}

PyObject* edges_notes(PyObject* self, PyObject*) {
  return guarded([&] { return in<Edges>(self).notes(); });
}

PyObject* edges_functions(PyObject* self, void*) {
  return guarded([&] { return PyBool_FromLong(in<Edges>(self).has_functions()); });
}

PyObject* edges_is_one_node(PyObject* self, void*) {
  return guarded([&] { return PyBool_FromLong(in<Edges>(self).is_one_node()); });
}

PyObject* edges_is_nested(PyObject* self, void*) {
  return guarded([&] { return PyBool_FromLong(in<Edges>(self).is_nested()); });
}

PyObject* edges_leaves(PyObject* self, void*) {
  return guarded([&] { return PyBool_FromLong(in<Edges>(self).has_leaves()); });
}

PyObject* edges_aliases(PyObject* self, void*) {
  return guarded([&] { return PyBool_FromLong(in<Edges>(self).has_aliases()); });
}

PyObject* edges_views(PyObject* self, void*) {
  return guarded([&] { return PyBool_FromLong(in<Edges>(self).has_views()); });
}

PyMethodDef edges_methods[] = {
    {"exits_of", edges_exits_of, METH_O, nullptr},
    {"listen", reinterpret_cast<PyCFunction>(edges_listen), METH_FASTCALL, nullptr},
    {"notes", edges_notes, METH_NOARGS, nullptr},
    {nullptr}};
PyGetSetDef edges_attributes[] = {{"has_aliases", edges_aliases, nullptr, nullptr, nullptr},
                                  {"has_views", edges_views, nullptr, nullptr, nullptr},
                                  {"has_functions", edges_functions, nullptr, nullptr, nullptr},
                                  {"has_leaves", edges_leaves, nullptr, nullptr, nullptr},
                                  {"is_nested", edges_is_nested, nullptr, nullptr, nullptr},
                                  {"is_one_node", edges_is_one_node, nullptr, nullptr, nullptr},
                                  {nullptr}};

PyType_Slot edges_slots[] = {{Py_tp_new, reinterpret_cast<void*>(new_edges)},
                             {Py_tp_dealloc, reinterpret_cast<void*>(unbox<Edges>)},
                             {Py_tp_methods, edges_methods},
                             {Py_tp_getset, edges_attributes},
                             {0, nullptr}};

PyType_Spec edges_spec = {"tensorprobe_native.Edges", sizeof(Box<Edges>), 0, Py_TPFLAGS_DEFAULT,
                          edges_slots};
PyTypeObject* edges_type = nullptr;

// -- Regions ---------------------------------------------------------------------------------

PyObject* new_regions(PyTypeObject* type, PyObject*, PyObject*) {
  return guarded([&] { return boxed(type, std::make_unique<Regions>()); });
}

PyObject* regions_only(PyObject* self, PyObject* args) {
  return guarded([&]() -> PyObject* {
    PyObject *edges, *output;
    int leaves, several = 0;
    if (!PyArg_ParseTuple(args, "O!Op|p", edges_type, &edges, &output, &leaves, &several)) {
      return nullptr;
    }
    return in<Regions>(self).only(in<Edges>(edges), output, leaves, several);
  });
}

PyObject* regions_walk(PyObject* self, PyObject* args) {
  return guarded([&]() -> PyObject* {
    PyObject *edges, *nodes, *ends;
    int leaves;
    if (!PyArg_ParseTuple(args, "O!O!Op", edges_type, &edges, &PyList_Type, &nodes, &ends,
                          &leaves)) {
      return nullptr;
    }
    if (ends != Py_None && !PyList_Check(ends)) {
      PyErr_SetString(PyExc_TypeError, "edges come as a list");
      return nullptr;
    }
    return in<Regions>(self).walk_from(in<Edges>(edges), nodes, ends, leaves);
  });
}

PyObject* regions_clear(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    in<Regions>(self).clear();
    Py_RETURN_NONE;
  });
}

PyMethodDef regions_methods[] = {{"only", regions_only, METH_VARARGS, nullptr},
                                 {"walk", regions_walk, METH_VARARGS, nullptr},
                                 {"clear", regions_clear, METH_NOARGS, nullptr},
                                 {nullptr}};

PyType_Slot regions_slots[] = {{Py_tp_new, reinterpret_cast<void*>(new_regions)},
                               {Py_tp_dealloc, reinterpret_cast<void*>(unbox<Regions>)},
                               {Py_tp_methods, regions_methods},
                               {0, nullptr}};

PyType_Spec regions_spec = {"tensorprobe_native.Regions", sizeof(Box<Regions>), 0,
                            Py_TPFLAGS_DEFAULT, regions_slots};

// -- Calls -----------------------------------------------------------------------------------

PyObject* boxed_edges(std::unique_ptr<Edges> edges) { return boxed(edges_type, std::move(edges)); }

// One of the things that a part is made of, by name; of a type, where one is given.
Ref part(PyObject* parts, const char* name, PyTypeObject* type = nullptr) {
  PyObject* found = PyDict_GetItemString(parts, name);
  if (found == nullptr || (type != nullptr && !PyObject_TypeCheck(found, type))) {
    PyErr_Format(PyExc_TypeError, "%s is missing, or not what it should be", name);
    throw python_error();
  }
  return Ref::borrow(found);
}

PyObject* new_calls(PyTypeObject* type, PyObject*, PyObject* parts) {
  return guarded([&]() -> PyObject* {
    if (parts == nullptr) {
      PyErr_SetString(PyExc_TypeError, "what records calls is given by name");
      return nullptr;
    }
    Recording python;
    python.tape = part(parts, "tape");
    python.lines = part(parts, "lines", lines_type);
    python.log = part(parts, "log", log_type);
    python.plans = part(parts, "plans", &PyDict_Type);
    python.describe = part(parts, "describe");
    python.counter = part(parts, "counter");
    python.place = part(parts, "place");
    python.keep = part(parts, "keep", &PyUnicode_Type);
    const Ref stacks = part(parts, "stacks");
    if (stacks.get() != Py_None) python.stacks.emplace(stacks);
    python.stand_ins = StandIns(part(parts, "stand_ins"), part(parts, "handler", &PyCode_Type));
    python.compiler = part(parts, "compiler", &PyDict_Type);
    python.state_notes = part(parts, "state_notes");
    python.encode = part(parts, "encode");
    python.positions = part(parts, "positions", &PyList_Type);
    python.only_path = part(parts, "only_path", &PyTuple_Type);
    python.output_spots = part(parts, "output_spots", &PyTuple_Type);
    python.no_aliases = part(parts, "no_aliases", &PyDict_Type);
    python.open_call = part(parts, "open_call");
    python.out = part(parts, "out", &PyFrozenSet_Type);
    python.call_names = part(parts, "call_names");
    python.call_line = part(parts, "call_line");
    python.end_line = part(parts, "end_line");
    python.stack_line = part(parts, "stack_line");
    python.raw = part(parts, "raw");
    python.one_node = part(parts, "one_node");
    python.one_way = part(parts, "one_way");
    python.any_way = part(parts, "any_way");
    python.node_run = part(parts, "node_run");
    python.wants_input = part(parts, "wants_input").get() == Py_True;
    python.wants_output = part(parts, "wants_output").get() == Py_True;
    Lines& lines = in<Lines>(python.lines.get());
    Log& log = in<Log>(python.log.get());
    if (!lines.is_nameless(python.keep.get())) {
      PyErr_SetString(PyExc_ValueError, "contents are kept by name");
      return nullptr;
    }
    return boxed(type, std::make_unique<Calls>(std::move(python), lines, log, boxed_edges));
  });
}

PyObject* calls_call(PyObject* self, Arguments args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    if (!takes("call", count, 4, 4)) return nullptr;
    return in<Calls>(self).call(self, args[0], args[1], args[2], args[3]);
  });
}

PyMethodDef calls_methods[] = {
    {"call", reinterpret_cast<PyCFunction>(calls_call), METH_FASTCALL, nullptr}, {nullptr}};

PyType_Slot calls_slots[] = {{Py_tp_new, reinterpret_cast<void*>(new_calls)},
                             {Py_tp_dealloc, reinterpret_cast<void*>(unbox<Calls>)},
                             {Py_tp_traverse, reinterpret_cast<void*>(traverse<Calls>)},
                             {Py_tp_clear, reinterpret_cast<void*>(clear<Calls>)},
                             {Py_tp_methods, calls_methods},
                             {0, nullptr}};

PyType_Spec calls_spec = {"tensorprobe_native.Calls", sizeof(Box<Calls>), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, calls_slots};

// -- Hooks -----------------------------------------------------------------------------------

PyObject* new_hooks(PyTypeObject* type, PyObject*, PyObject* parts) {
  return guarded([&]() -> PyObject* {
    if (parts == nullptr) {
      PyErr_SetString(PyExc_TypeError, "what follows modules is given by name");
      return nullptr;
    }
    const auto is_true = [&](const char* name) { return part(parts, name).get() == Py_True; };
    ModuleCalls python;
    python.hooks = part(parts, "hooks");
    python.calls = part(parts, "calls");
    python.tape = part(parts, "tape");
    python.place = part(parts, "place");
    python.thread = part(parts, "thread");
    python.trained = part(parts, "trained", &PyDict_Type);
    python.compiler = part(parts, "compiler", &PyDict_Type);
    python.call_impl = part(parts, "call_impl", &PyCode_Type);
    python.entered = part(parts, "entered");
    python.left = part(parts, "left");
    python.describe = part(parts, "describe");
    python.failed = part(parts, "failed");
    python.note_buffers = part(parts, "note_buffers");
    python.entry = part(parts, "entry", &PyType_Type);
    python.call_names = part(parts, "call_names");
    python.count = part(parts, "count");
    python.records = is_true("records");
    python.stacks = is_true("stacks");
    python.keep = part(parts, "keep");
    if (python.keep.get() != Py_None) {
      python.lines = part(parts, "lines");
      python.named = part(parts, "named");
      python.results = part(parts, "results");
      python.versions = part(parts, "versions");
      python.edges = part(parts, "edges");
      python.writer = part(parts, "writer");
      python.open_call = part(parts, "open_call");
      python.call_line = part(parts, "call_line");
      python.end_line = part(parts, "end_line");
      python.way = part(parts, "way");
      python.ways = part(parts, "ways");
      python.no_aliases = part(parts, "no_aliases");
      python.output_spots = part(parts, "output_spots", &PyTuple_Type);
      python.is_autocast = part(parts, "is_autocast");
      python.graph_task = part(parts, "graph_task");
      python.state_notes = part(parts, "state_notes");
      python.functions_of = part(parts, "functions_of");
      python.encode = part(parts, "encode");
      python.traced = part(parts, "traced");
      python.end_failed = part(parts, "end_failed");
      python.stack_table = StackTable(part(parts, "stack_table"));
      python.new_stack = part(parts, "new_stack");
      python.only_path = part(parts, "only_path", &PyTuple_Type);
      python.wants_input = part(parts, "wants_input", &PyBool_Type);
      python.wants_output = part(parts, "wants_output", &PyBool_Type);
      python.wants_parameters = part(parts, "wants_parameters", &PyBool_Type);
      python.config_stacks = is_true("config_stacks");
      python.backward = is_true("backward");
      python.sees_functions = is_true("sees_functions");
    }
    return boxed(type, std::make_unique<Hooks>(std::move(python)));
  });
}

PyObject* hooks_enter(PyObject* self, Arguments args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    if (!takes("enter", count, 3, 3)) return nullptr;
    return in<Hooks>(self).enter(args[0], args[1], args[2]);
  });
}

PyObject* hooks_leave(PyObject* self, Arguments args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    if (!takes("leave", count, 3, 3)) return nullptr;
    return in<Hooks>(self).leave(args[0], args[1], args[2]);
  });
}

PyMethodDef hooks_methods[] = {
    {"enter", reinterpret_cast<PyCFunction>(hooks_enter), METH_FASTCALL, nullptr},
    {"leave", reinterpret_cast<PyCFunction>(hooks_leave), METH_FASTCALL, nullptr},
    {nullptr}};

PyType_Slot hooks_slots[] = {{Py_tp_new, reinterpret_cast<void*>(new_hooks)},
                             {Py_tp_dealloc, reinterpret_cast<void*>(unbox<Hooks>)},
                             {Py_tp_traverse, reinterpret_cast<void*>(traverse<Hooks>)},
                             {Py_tp_clear, reinterpret_cast<void*>(clear<Hooks>)},
                             {Py_tp_methods, hooks_methods},
                             {0, nullptr}};

PyType_Spec hooks_spec = {"tensorprobe_native.Hooks", sizeof(Box<Hooks>), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, hooks_slots};

// -- EveryCall -------------------------------------------------------------------------------

PyObject* new_every_call(PyTypeObject* type, PyObject* args, PyObject*) {
  return guarded([&]() -> PyObject* {
    PyObject *mode, *observer, *plans, *stand_ins, *facts;
    if (!PyArg_ParseTuple(args, "OOO!OO!", &mode, &observer, &PyDict_Type, &plans, &stand_ins,
                          &PyDict_Type, &facts)) {
      return nullptr;
    }
    PyObject* self = boxed(type, std::make_unique<EveryCall>(mode, observer, plans, stand_ins, facts));
    if (self != nullptr) in<EveryCall>(self).belong_to(self);
    return self;
  });
}

PyObject* every_call_call(PyObject* self, Arguments args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    if (!takes("call", count, 4, 4)) return nullptr;
    return in<EveryCall>(self).call(args[0], args[1], args[2], args[3]);
  });
}

PyObject* every_call_hold_plain(PyObject* self, Arguments args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    if (!takes("hold_plain", count, 2, 2)) return nullptr;
    return in<EveryCall>(self).hold_plain(args[0], args[1]);
  });
}

PyMethodDef every_call_methods[] = {
    {"call", reinterpret_cast<PyCFunction>(every_call_call), METH_FASTCALL, nullptr},
    {"hold_plain", reinterpret_cast<PyCFunction>(every_call_hold_plain), METH_FASTCALL, nullptr},
    {nullptr}};

PyType_Slot every_call_slots[] = {{Py_tp_new, reinterpret_cast<void*>(new_every_call)},
                             {Py_tp_dealloc, reinterpret_cast<void*>(unbox<EveryCall>)},
                             {Py_tp_traverse, reinterpret_cast<void*>(traverse<EveryCall>)},
                             {Py_tp_clear, reinterpret_cast<void*>(clear<EveryCall>)},
                             {Py_tp_methods, every_call_methods},
                             {0, nullptr}};

PyType_Spec every_call_spec = {"tensorprobe_native.EveryCall", sizeof(Box<EveryCall>), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, every_call_slots};

// -- ModuleTrails ----------------------------------------------------------------------------

PyObject* new_module_trails(PyTypeObject* type, PyObject* args, PyObject*) {
  return guarded([&]() -> PyObject* {
    PyObject *hooks, *stay, *generated, *getframe;
    if (!PyArg_ParseTuple(args, "OO!O!O", &hooks, &PyType_Type, &stay, &PyType_Type, &generated,
                          &getframe)) {
      return nullptr;
    }
    auto* kind = reinterpret_cast<PyTypeObject*>(stay);
    if (!PyType_IsSubtype(kind, &PyTuple_Type)) {
      PyErr_SetString(PyExc_TypeError, "entries are tuples");
      return nullptr;
    }
    return boxed(type, std::make_unique<ModuleTrails>(
                           hooks, kind, reinterpret_cast<PyTypeObject*>(generated), getframe));
  });
}

// Whether it was done; what fails is left to Python, which notes why.
template <typename Body>
PyObject* attempted(Body body) {
  PyObject* is_done = guarded([&] { return PyBool_FromLong(body()); });
  if (is_done != nullptr || !PyErr_ExceptionMatches(PyExc_Exception)) return is_done;
  PyErr_Clear();
  Py_RETURN_FALSE;
}

PyObject* module_trails_enter(PyObject* self, PyObject* module) {
  return attempted([&] { return in<ModuleTrails>(self).enter(module); });
}

PyObject* module_trails_leave(PyObject* self, PyObject* module) {
  return attempted([&] { return in<ModuleTrails>(self).leave(module); });
}

PyMethodDef module_trails_methods[] = {{"enter", module_trails_enter, METH_O, nullptr},
                                     {"leave", module_trails_leave, METH_O, nullptr},
                                     {nullptr}};

PyType_Slot module_trails_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(new_module_trails)},
    {Py_tp_dealloc, reinterpret_cast<void*>(unbox<ModuleTrails>)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse<ModuleTrails>)},
    {Py_tp_clear, reinterpret_cast<void*>(clear<ModuleTrails>)},
    {Py_tp_methods, module_trails_methods},
    {0, nullptr}};

PyType_Spec module_trails_spec = {"tensorprobe_native.ModuleTrails", sizeof(Box<ModuleTrails>), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, module_trails_slots};

// -- Versions --------------------------------------------------------------------------------

PyObject* versions(PyObject*, PyObject* inputs) {
  return guarded([&]() -> PyObject* {
    if (!are_inputs(inputs)) {
      PyErr_SetString(PyExc_TypeError, "inputs are a list of tensors and paths");
      return nullptr;
    }
    const Py_ssize_t count = PyList_GET_SIZE(inputs);
    Ref found = Ref::steal(PyList_New(count));
    if (!found) return nullptr;
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject* version = PyLong_FromLongLong(version_of(PyList_GET_ITEM(inputs, i)));
      if (version == nullptr) return nullptr;
      PyList_SET_ITEM(found.get(), i, version);
    }
    return found.release();
  });
}

PyObject* walk_stack(PyObject*, Arguments args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    if (!takes("walk_stack", count, 4, 4)) return nullptr;
    const long most = PyLong_AsLong(args[3]);
    if (PyErr_Occurred()) return nullptr;
    const Ref frame = args[0] == Py_None ? Ref() : Ref::borrow(args[0]);
    return tensorprobe::walk_stack(frame, args[1], args[2], most);
  });
}

// The number by which torch knows this thread.
PyObject* thread(PyObject*, PyObject*) {
  return PyLong_FromUnsignedLongLong(at::RecordFunction::currentThreadId());
}

// That of the thread which has made a node of the graph.
PyObject* thread_of(PyObject*, PyObject* node) {
  return guarded([&]() -> PyObject* {
    return PyLong_FromUnsignedLongLong(Regions::thread_of(node));
  });
}

PyMethodDef functions[] = {
    {"thread", thread, METH_NOARGS, nullptr},
    {"thread_of", thread_of, METH_O, nullptr},
    {"versions", versions, METH_O, nullptr},
    {"walk_stack", reinterpret_cast<PyCFunction>(walk_stack), METH_FASTCALL, nullptr},
    {nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "tensorprobe_native", nullptr, -1, functions};

bool add_type(PyObject* module, const char* name, PyType_Spec& spec, PyTypeObject** kept) {
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr) return false;
  if (kept != nullptr) *kept = reinterpret_cast<PyTypeObject*>(type);
  return PyModule_AddObjectRef(module, name, type) == 0;
}

// {class: (names of its attributes)}, for `native.check`.
PyObject* attribute_table() {
  return guarded([&]() -> PyObject* {
    Ref table = must(PyDict_New());
    for (const Attributes& row : ATTRIBUTES) {
      const Ref text = must(PyUnicode_FromStringAndSize(row.names.data(), row.names.size()));
      const Ref names = must(PyUnicode_Split(text.get(), nullptr, -1));
      if (PyDict_SetItemString(table.get(), row.of, names.get()) < 0) return nullptr;
    }
    return table.release();
  });
}

}  // namespace
}  // namespace tensorprobe

PyMODINIT_FUNC PyInit_tensorprobe_native() {
  using namespace tensorprobe;
  PyObject* module = PyModule_Create(&definition);
  if (module == nullptr) return nullptr;
  const Ref table = Ref::steal(attribute_table());
  if (!table || PyModule_AddObjectRef(module, "ATTRIBUTES", table.get()) < 0 ||
      !add_type(module, "Contents", contents_spec, &contents_type) ||
      !add_type(module, "Lines", lines_spec, &lines_type) ||
      !add_type(module, "Log", log_spec, &log_type) ||
      !add_type(module, "Starter", starter_spec, nullptr) ||
      !add_type(module, "Edges", edges_spec, &edges_type) ||
      !add_type(module, "Calls", calls_spec, nullptr) ||
      !add_type(module, "Hooks", hooks_spec, nullptr) ||
      !add_type(module, "Regions", regions_spec, nullptr) ||
      !add_type(module, "EveryCall", every_call_spec, nullptr) ||
      !add_type(module, "ModuleTrails", module_trails_spec, nullptr)) {
    Py_DECREF(module);
    return nullptr;
  }
  return module;
}
