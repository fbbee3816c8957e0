// Writing the lines of calls: what `CaptureWriter.call` and `end` of store/writer.py do as a rule.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <string>

#include "asking.h"

namespace tensorprobe {

class Log {
 public:
  // `encode` makes text of a list of lines. `call` and `end` are the writer's own methods, for what
  // is not as a rule: text that is not UTF-8, a log that cannot be written to, a step that ended.
  Log(Ref writer, Ref encode, Ref call, Ref end)
      : writer_(std::move(writer)),
        fields_(writer_.get()),
        encode_(std::move(encode)),
        call_(std::move(call)),
        end_(std::move(end)) {
    Ref lock = fields_.get(word<"_log_lock">());
    acquire_ = attribute<"acquire">(lock);
    release_ = attribute<"release">(lock);
  }

  PyObject* call(PyObject* line) {
    TORCH_CHECK(writer_, APART);
    Ref step = fields_.get(word<"_step">());
    if (step.get() == Py_None) Py_RETURN_NONE;
    Ref text = encoded(line);
    if (!text || is_unusual(step)) return PyObject_CallOneArg(call_.get(), line);
    Ref lines = Fields(step.get()).get(word<"lines">());
    if (PyList_Append(lines.get(), text.get()) < 0) return nullptr;
    const Held held(acquire_, release_);
    count(Fields(step.get()), word<"n_calls">(), 1);
    if (!write(step, lines)) return nullptr;
    Py_RETURN_NONE;
  }

  PyObject* end(PyObject* line) {
    TORCH_CHECK(writer_, APART);
    Ref step = fields_.get(word<"_step">());
    if (step.get() == Py_None) Py_RETURN_NONE;
    Ref text = encoded(line);
    if (!text || is_unusual(step)) return PyObject_CallOneArg(end_.get(), line);
    Ref lines = Fields(step.get()).get(word<"lines">());
    if (PyList_Append(lines.get(), text.get()) < 0) return nullptr;
    Ref asleep = fields_.get(word<"_asleep">());
    if (asleep.get() == Py_True) {
      return PyObject_CallMethodNoArgs(writer_.get(), word<"_wake">());
    }
    Py_RETURN_NONE;
  }

  // The line of a call that is text already, with its newline.
  bool call_text(const std::string& text) {
    TORCH_CHECK(writer_, APART);
    Ref step = fields_.get(word<"_step">());
    if (step.get() == Py_None) return true;
    const Held held(acquire_, release_);
    const Fields fields(step.get());
    count(fields, word<"n_calls">(), 1);
    return write(step, fields.get(word<"lines">()), &text);
  }

  // The same of the end of a call; `make_line` gives the line itself, for what is not as a rule.
  template <typename MakeLine>
  bool end_text(const std::string& text, MakeLine make_line) {
    TORCH_CHECK(writer_, APART);
    Ref step = fields_.get(word<"_step">());
    if (step.get() == Py_None) return true;
    if (is_unusual(step)) {
      Ref line = make_line();
      if (!line) return false;
      return static_cast<bool>(Ref::steal(PyObject_CallOneArg(end_.get(), line.get())));
    }
    add(step, must(PyBytes_FromStringAndSize(text.data(), text.size())));
    return true;
  }

  // Let a line wait for the next write; false where something is not as a rule, and it does not.
  bool wait(const Ref& bytes) {
    TORCH_CHECK(writer_, APART);
    Ref step = fields_.get(word<"_step">());
    if (step.get() == Py_None) return true;
    if (is_unusual(step)) return false;
    add(step, bytes);
    return true;
  }

  int traverse(visitproc visit, void* arg) const {
    for (const Ref* ref : {&writer_, &encode_, &call_, &end_}) {
      if (int stop = ref->visit(visit, arg)) return stop;
    }
    return fields_.visit(visit, arg);
  }
  void let_go() {
    writer_ = encode_ = call_ = end_ = Ref();
    fields_ = Fields();
  }

 private:
  // A lock of Python's, held.
  class Held {
   public:
    Held(const Ref& acquire, Ref release) : release_(std::move(release)) {
      must(PyObject_CallNoArgs(acquire.get()));
    }
    ~Held() {
      PyObject *type, *value, *trace;
      PyErr_Fetch(&type, &value, &trace);
      Ref done = Ref::steal(PyObject_CallNoArgs(release_.get()));
      PyErr_Restore(type, value, trace);
    }

   private:
    Ref release_;
  };

  void add(const Ref& step, const Ref& bytes) {
    Ref lines = Fields(step.get()).get(word<"lines">());
    if (PyList_Append(lines.get(), bytes.get()) < 0) throw python_error();
    if (fields_.get(word<"_asleep">()).get() == Py_True) {
      must(PyObject_CallMethodNoArgs(writer_.get(), word<"_wake">()));
    }
  }

  // Nothing where it cannot be, which the writer's own method says.
  Ref encoded(PyObject* line) const {
    Ref list = must(PyList_New(1));
    PyList_SET_ITEM(list.get(), 0, Py_NewRef(line));
    Ref text = Ref::steal(PyObject_CallOneArg(encode_.get(), list.get()));
    if (text) return text;
    if (!PyErr_ExceptionMatches(PyExc_Exception)) throw python_error();
    PyErr_Clear();
    return Ref();
  }

  bool is_unusual(const Ref& step) const {
    return fields_.get(word<"_log_broken">()).get() != Py_False ||
           Fields(step.get()).get(word<"closed">()).get() != Py_False;
  }

  static void count(const Fields& fields, PyObject* name, Py_ssize_t more) {
    Ref before = fields.get(name);
    const long long value = PyLong_AsLongLong(before.get());
    if (value == -1 && PyErr_Occurred()) throw python_error();
    Ref after = must(PyLong_FromLongLong(value + more));
    fields.set(name, after.get());
  }

  // Writes the lines that wait, and then the `last`. The log's lock is held.
  bool write(const Ref& step, const Ref& lines, const std::string* last = nullptr) {
    std::string text;
    text.reserve(1500);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(lines.get()); ++i) {
      PyObject* part = PyList_GET_ITEM(lines.get(), i);
      if (!PyBytes_Check(part)) {
        PyErr_SetString(PyExc_TypeError, "a line is not bytes");
        return false;
      }
      text.append(PyBytes_AS_STRING(part), PyBytes_GET_SIZE(part));
    }
    if (last != nullptr) text += *last;
    if (PyList_SetSlice(lines.get(), 0, PyList_GET_SIZE(lines.get()), nullptr) < 0) return false;
    if (is_unusual(step)) return true;  // while the lock was waited for
    Ref number = Fields(step.get()).get(word<"log_fd">());
    const long file = PyLong_AsLong(number.get());
    if (file == -1 && PyErr_Occurred()) return false;
    size_t written = 0;
    Raised raised;
    while (written < text.size()) {
      ssize_t some;
      Py_BEGIN_ALLOW_THREADS
      some = ::write(static_cast<int>(file), text.data() + written, text.size() - written);
      Py_END_ALLOW_THREADS
      if (some >= 0) {
        written += some;
      } else if (errno != EINTR) {
        PyErr_SetFromErrno(PyExc_OSError);
        fail(step, written);
        return raised.none_left();
      } else if (PyErr_CheckSignals() < 0) {  // as os.write: the rest of the line goes first
        raised.take();
      }
    }
    count(fields_, word<"nbytes_written">(), static_cast<Py_ssize_t>(written));
    return raised.none_left();
  }

  // What a signal's handler raised while a line was written.
  class Raised {
   public:
    void take() {
      PyObject *type, *value, *trace;
      PyErr_Fetch(&type, &value, &trace);
      type_ = Ref::steal(type), value_ = Ref::steal(value), trace_ = Ref::steal(trace);
    }
    bool none_left() {  // or it is raised now
      if (!type_) return true;
      PyErr_Restore(type_.release(), value_.release(), trace_.release());
      return false;
    }

   private:
    Ref type_, value_, trace_;
  };

  // Hand the error that is set to the writer, which writes no more.
  void fail(const Ref& step, size_t written) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    Ref held_type = Ref::steal(type), error = Ref::steal(value), held_trace = Ref::steal(trace);
    Ref count = must(PyLong_FromSize_t(written));
    Ref done = must(PyObject_CallMethodObjArgs(writer_.get(), word<"_break_log">(), step.get(),
                                                 error.get(), count.get(), nullptr));
  }

  Ref writer_;
  Fields fields_;  // the writer's
  Ref encode_, call_, end_, acquire_, release_;
};

}  // namespace tensorprobe
