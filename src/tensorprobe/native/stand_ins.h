// Calls of the program in a frame that stands for its own: what `follow.stand_ins` does for lines
// that it has met.
#pragma once

#include <torch/csrc/jit/frontend/tracer.h>

#include <unordered_map>

#include "asking.h"
#include "stacks.h"

namespace tensorprobe {

class StandIns {
 public:
  StandIns() = default;
  // `stand_ins` is Python's; `handler` the code through which functions in Python call a mode.
  StandIns(const Ref& stand_ins, const Ref& handler) : python_(stand_ins), handler_(handler) {}

  // As `StandIns.make`, where the frame that this is called from is that of the mode.
  PyObject* make(PyObject* func, PyObject* args, PyObject* kwargs) {
    Ref found, counted;
    if (!attempt([&] {
          const Ref frame = programs(func);
          if (frame) found = find(frame);
          if (frame && kwargs != nullptr && has_level(kwargs)) {
            counted = method<"count_levels">(python_, kwargs, frame.get());
            kwargs = counted.get();
          }
        })) {
      return nullptr;
    }
    if (!found) return PyObject_Call(func, args, kwargs);
    PyObject* given[] = {func, args, kwargs == nullptr ? Py_None : kwargs};
    return PyObject_Vectorcall(found.get(), given, 3, nullptr);
  }

  static bool is_tracing() { return torch::jit::tracer::isTracing(); }

  int traverse(visitproc visit, void* arg) const {
    for (const auto& [place, known] : known_) {
      if (int stop = known.stand_in.visit(visit, arg)) return stop;
    }
    return python_.visit(visit, arg);
  }
  void let_go() {
    const auto gone = std::exchange(known_, {});
    const Ref python = std::exchange(python_, Ref());
  }

 private:
  static constexpr int NEAR = 4;
  static constexpr size_t MOST = 20'000;

  struct Known {
    Ref code, stand_in;  // the code is held: its address is its own only while it lives
  };
  struct Place {
    PyObject* code;
    int at;
    bool operator==(const Place& other) const { return code == other.code && at == other.at; }
  };
  struct Hash {
    size_t operator()(const Place& place) const {
      return std::hash<PyObject*>()(place.code) ^ (static_cast<size_t>(place.at) << 8);
    }
  };

  static PyFrameObject* in(const Ref& frame) {
    return reinterpret_cast<PyFrameObject*>(frame.get());
  }
  static Ref code_of(const Ref& frame) {
    return Ref::steal(reinterpret_cast<PyObject*>(PyFrame_GetCode(in(frame))));
  }

  // Of a few functions whose warnings may be about a line further out.
  static bool has_level(PyObject* kwargs) {
    const int has = PyDict_Contains(kwargs, literal<"_stacklevel">());
    if (has < 0) throw python_error();
    return has;
  }

  // None where the thread has no line of the program.
  Ref programs(PyObject* func) const {
    if (!python_) return Ref();
    const Ref mode = Ref::borrow(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
    return mode ? caller(back(mode), func) : Ref();
  }

  Ref find(const Ref& frame) {
    const Ref code = code_of(frame);
    const Place place{code.get(), last_instruction(frame)};
    const auto known = known_.find(place);
    if (known != known_.end() && has_globals(frame, known->second.stand_in)) {
      return known->second.stand_in;
    }
    const Ref made = method<"at">(python_, frame.get());
    TORCH_CHECK(PyFunction_Check(made.get()), "a stand-in is a function");
    if (known_.size() >= MOST) known_.clear();
    known_[place] = {code, made};
    return made;
  }

  // As `_caller`.
  Ref caller(const Ref& frame, PyObject* func) const {
    if (!frame || code_of(frame).get() != handler_.get()) return frame;
    PyObject* code = PyFunction_Check(func) ? PyFunction_GetCode(func) : nullptr;
    const Ref first = back(frame);
    Ref outer = first;
    for (int i = 0; i < NEAR && outer && code_of(outer).get() != code; ++i) outer = back(outer);
    if (!outer || code_of(outer).get() != code) outer = first;
    return outer ? back(outer) : Ref();
  }

  static int last_instruction(const Ref& frame) {
#if PY_VERSION_HEX >= 0x030B0000
    return PyFrame_GetLasti(in(frame));
#else
    return in(frame)->f_lasti;
#endif
  }

  static bool has_globals(const Ref& frame, const Ref& stand_in) {
#if PY_VERSION_HEX >= 0x030B0000
    const Ref globals = Ref::steal(PyFrame_GetGlobals(in(frame)));
#else
    const Ref globals = Ref::borrow(in(frame)->f_globals);
#endif
    return globals.get() == PyFunction_GET_GLOBALS(stand_in.get());
  }

  Ref python_, handler_;
  std::unordered_map<Place, Known, Hash> known_;
};

}  // namespace tensorprobe
