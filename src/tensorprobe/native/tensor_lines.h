// Lines of tensors and arguments: what `record.tensor_lines.TensorLines` does of plain ones.
#pragma once

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "values.h"

namespace tensorprobe {

// Python's side of it: what is called for all that is not plain, and how lines are made.
struct Callbacks {
  Ref raw;        // msgspec.Raw
  Ref head;       // (tensor, grad, keep) -> (beginning, form, whole without content)
  Ref encoded;    // as `encoded`, of any tensor
  Ref repeated;   // as `TensorLines.repeated`
  Ref encoder;    // as `TensorLines.encoder`
  Ref tree;       // as `record.encode.encode`
  Ref atoms;      // by type, what encodes a value without parts
  Ref positions;  // the paths of positional arguments
  Py_ssize_t max_text = 0;
};

class Lines {
 public:
  Lines(Ref contents_object, Contents& contents, Callbacks callbacks)
      : contents_object_(std::move(contents_object)),
        contents_(contents),
        python_(std::move(callbacks)) {}

  // `{"tensor": line}` ready to be written; `grad` is None where the tensor is to say it.
  PyObject* encoded(PyObject* object, PyObject* call, PyObject* role, PyObject* label,
                    PyObject* wanted, PyObject* grad) {
    TORCH_CHECK(contents_object_, APART);
    if (!is_own_type(object)) return slowly(object, call, role, label, wanted, grad);
    const at::Tensor& tensor = tensor_in(object);
    const at::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
    if (!is_plain(impl)) return slowly(object, call, role, label, wanted, grad);
    Ref keep = Ref::steal(PyObject_GetAttr(call, word<"keep">()));
    if (!keep) return nullptr;
    const bool has_grad = grad == Py_None ? tensor.requires_grad() : grad == Py_True;
    // Held: what makes a content's number may come back here.
    const std::shared_ptr<const Head> head = head_of(object, tensor, has_grad, keep.get());
    if (head == nullptr) return nullptr;
    if (!head->form || wanted != Py_True) return Py_NewRef(head->without.get());
    Ref number = Ref::steal(
        contents_.of(object, head->form.get(), call, role, label, keep.get()));
    if (!number) return nullptr;
    return with_value(head->beginning, number.get());
  }

  // Write the same of a plain tensor at the end of a text; `same` is the label of an equal one.
  // Only where contents are nameless.
  bool append(PyObject* object, bool grad, PyObject* role, PyObject* label, bool wanted,
              PyObject* keep, const std::string* same, std::string& text) {
    TORCH_CHECK(contents_object_, APART);
    const std::shared_ptr<const Head> head = head_of(object, tensor_in(object), grad, keep);
    if (head == nullptr) return false;
    const bool has_value = head->form && wanted;
    const size_t start = text.size();
    text.append(head->beginning, 0,
                head->beginning.size() - (has_value ? 0 : std::strlen(VALUE)));
    if (same != nullptr) {  // `TensorLines.line` leaves out what is usual
      const size_t usual = text.find(HOST, start);
      if (usual != std::string::npos) text.erase(usual, std::strlen(HOST));
    }
    if (has_value && !contents_.append_number(object, head->form.get(), role, label, keep, text)) {
      return false;
    }
    if (same != nullptr) text.append(",\"same\":\"").append(*same).append("\"");
    text += "}}";
    return true;
  }

  // As `Values.forget`.
  void forget(PyObject* tensor) {
    TORCH_CHECK(contents_object_, APART);
    if (!Ref::steal(contents_.forget(tensor))) throw python_error();
  }

  bool is_nameless(PyObject* keep) const { return contents_object_ && contents_.is_nameless(keep); }

  // The trees of a call's arguments as (positional, keywords); tensors are added to call.inputs.
  PyObject* arguments(PyObject* call, PyObject* args, PyObject* kwargs, PyObject* wanted) {
    TORCH_CHECK(contents_object_, APART);
    Ref inputs = Ref::steal(PyObject_GetAttr(call, word<"inputs">()));
    Ref given = Ref::steal(PySequence_Fast(args, "arguments"));
    if (!inputs || !given) return nullptr;
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(given.get());
    const Py_ssize_t paths = PyList_GET_SIZE(python_.positions.get());
    Ref positional = Ref::steal(PyList_New(count));
    Ref keywords = Ref::steal(PyDict_New());
    if (!positional || !keywords) return nullptr;
    Side side{call, literal<"input">(), wanted, inputs.get(), {}, {}};
    for (Py_ssize_t i = 0; i < count; ++i) {
      Ref far;
      PyObject* path;
      if (i < paths) {
        path = PyList_GET_ITEM(python_.positions.get(), i);
      } else {
        far = Ref::steal(Py_BuildValue("(N)", PyUnicode_FromFormat("%zd", i)));
        if (!far) return nullptr;
        path = far.get();
      }
      PyObject* tree = argument(side, PySequence_Fast_GET_ITEM(given.get(), i), path);
      if (tree == nullptr) return nullptr;
      PyList_SET_ITEM(positional.get(), i, tree);
    }
    PyObject *name, *value;
    Py_ssize_t at = 0;
    while (PyDict_Next(kwargs, &at, &name, &value)) {
      Ref path = Ref::steal(PyTuple_Pack(1, name));
      if (!path) return nullptr;
      Ref held = Ref::borrow(value), key = Ref::borrow(name);
      Ref tree = Ref::steal(argument(side, value, path.get()));
      if (!tree || PyDict_SetItem(keywords.get(), key.get(), tree.get()) < 0) return nullptr;
    }
    return PyTuple_Pack(2, positional.get(), keywords.get());
  }

  // The tree of a call's results, a tuple or list of plain things, whose tensors are added to
  // `outputs`; None where it is something else.
  PyObject* results(PyObject* value, PyObject* call, PyObject* wanted, PyObject* outputs) {
    TORCH_CHECK(contents_object_, APART);
    if (!is_nest(value, 0)) Py_RETURN_NONE;
    Ref top = Ref::steal(PyTuple_New(0));
    if (!top) return nullptr;
    Side side{call, literal<"output">(), wanted, outputs, {}, {}};
    return nest(side, value, top.get());
  }

  // The lines of tensors, [(name, tensor)], that a call has by name: {name: line}.
  PyObject* named(PyObject* tensors, PyObject* call, PyObject* role, PyObject* wanted) {
    TORCH_CHECK(contents_object_, APART);
    Ref given = Ref::steal(PySequence_Fast(tensors, "tensors"));
    Ref lines = Ref::steal(PyDict_New());
    if (!given || !lines) return nullptr;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(given.get()); ++i) {
      const Ref pair = Ref::borrow(PySequence_Fast_GET_ITEM(given.get(), i));
      PyObject *name, *tensor;
      if (!PyArg_ParseTuple(pair.get(), "OO", &name, &tensor)) return nullptr;
      const Ref part = Ref::steal(encoded(tensor, call, role, name, wanted, Py_None));
      const Ref line = part ? out_of_tree(part) : Ref();
      if (!line || PyDict_SetItem(lines.get(), name, line.get()) < 0) return nullptr;
    }
    return lines.release();
  }

  int traverse(visitproc visit, void* arg) const {
    const Ref* held[] = {&contents_object_, &python_.head,    &python_.encoded,
                         &python_.repeated, &python_.encoder, &python_.tree};
    for (const Ref* ref : held) {
      if (int stop = ref->visit(visit, arg)) return stop;
    }
    return 0;
  }
  void let_go() {
    contents_object_ = Ref();
    python_ = Callbacks();
  }

 private:
  // What a line says of a plain tensor, its content excepted, and how such a line begins.
  struct Head {
    std::vector<int64_t> kind;
    std::string beginning;
    Ref form;  // none where no content is wanted
    Ref without;
    Ref keep;  // known by its address, so held
  };

  // The tensors of a call's arguments that were met: in `met`, or from the first nest on in `seen`.
  struct Side {
    PyObject* call;
    PyObject* role;
    PyObject* wanted;
    PyObject* inputs;
    std::vector<std::pair<PyObject*, PyObject*>> met;
    Ref seen;
  };

  static constexpr size_t MAX_KINDS = 10'000;
  static constexpr const char* VALUE = ",\"value\":";
  static constexpr const char* HOST = ",\"device\":\"cpu\"";
  static constexpr Py_ssize_t MAX_ITEMS = 64;  // of what is no longer plain
  static constexpr int MAX_DEPTH = 3;

  PyObject* slowly(PyObject* tensor, PyObject* call, PyObject* role, PyObject* label,
                   PyObject* wanted, PyObject* grad) {
    PyObject* arguments[] = {tensor, call, role, label, wanted, grad};
    return PyObject_Vectorcall(python_.encoded.get(), arguments, 6, nullptr);
  }

  std::shared_ptr<const Head> head_of(PyObject* object, const at::Tensor& tensor, bool grad,
                                      PyObject* keep) {
    const auto sizes = tensor.sizes();
    const auto strides = tensor.strides();
    const auto device = tensor.device();
    kind_.clear();
    kind_.push_back(reinterpret_cast<int64_t>(keep));
    kind_.push_back((static_cast<int64_t>(tensor.scalar_type()) << 1) | grad);
    kind_.push_back((static_cast<int64_t>(device.type()) << 16) |
                    static_cast<uint16_t>(device.index()));
    kind_.insert(kind_.end(), sizes.begin(), sizes.end());
    kind_.insert(kind_.end(), strides.begin(), strides.end());
    uint64_t hash = kind_.size();
    for (int64_t part : kind_) hash = mix(hash, part);
    auto& alike = heads_[hash];
    for (const auto& head : alike) {
      if (head->kind == kind_) return head;
    }
    return new_head(hash, object, grad, keep);
  }

  std::shared_ptr<const Head> new_head(uint64_t hash, PyObject* tensor, bool grad,
                                       PyObject* keep) {
    const std::vector<int64_t> kind = kind_;  // Python may come back here meanwhile
    PyObject* arguments[] = {tensor, grad ? Py_True : Py_False, keep};
    Ref made = Ref::steal(PyObject_Vectorcall(python_.head.get(), arguments, 3, nullptr));
    PyObject *beginning, *form, *without;
    if (!made || !PyArg_ParseTuple(made.get(), "SOO", &beginning, &form, &without)) return nullptr;
    const int64_t number = PyLong_AsLongLong(form);
    if (number == -1 && PyErr_Occurred()) return nullptr;
    if (n_heads_ >= MAX_KINDS) {
      heads_.clear();
      n_heads_ = 0;
    }
    ++n_heads_;
    const std::string start(PyBytes_AS_STRING(beginning), PyBytes_GET_SIZE(beginning));
    auto head = std::make_shared<const Head>(
        Head{kind, start + VALUE, number < 0 ? Ref() : Ref::borrow(form),
             Ref::borrow(without), Ref::borrow(keep)});
    heads_[hash].push_back(head);
    return head;
  }

  PyObject* with_value(const std::string& start, PyObject* number) {
    const long long value = PyLong_AsLongLong(number);
    if (value == -1 && PyErr_Occurred()) return nullptr;
    char digits[24];
    const int length = snprintf(digits, sizeof digits, "%lld}}", value);
    Ref line = Ref::steal(PyBytes_FromStringAndSize(nullptr, start.size() + length));
    if (!line) return nullptr;
    memcpy(PyBytes_AS_STRING(line.get()), start.data(), start.size());
    memcpy(PyBytes_AS_STRING(line.get()) + start.size(), digits, length);
    return PyObject_CallOneArg(python_.raw.get(), line.get());
  }

  // The line of a tensor without the tree around it, `{"tensor":` and `}`.
  Ref out_of_tree(const Ref& part) const {
    PyObject* const key = literal<"tensor">();
    constexpr Py_ssize_t before = 10, after = 1;
    if (reinterpret_cast<PyObject*>(Py_TYPE(part.get())) != python_.raw.get()) {
      return Ref::steal(PyObject_GetItem(part.get(), key));
    }
    Py_buffer text;
    if (PyObject_GetBuffer(part.get(), &text, PyBUF_SIMPLE) < 0) return Ref();
    const Ref line = Ref::steal(PyBytes_FromStringAndSize(
        static_cast<const char*>(text.buf) + before, text.len - before - after));
    PyBuffer_Release(&text);
    return line ? Ref::steal(PyObject_CallOneArg(python_.raw.get(), line.get())) : Ref();
  }

  PyObject* argument(Side& side, PyObject* value, PyObject* path) {
    if (is_own_type(value)) return tensor_argument(side, value, path);
    if (is_written(value)) return Py_NewRef(value);
    PyObject* atom = PyDict_GetItemWithError(python_.atoms.get(),
                                             reinterpret_cast<PyObject*>(Py_TYPE(value)));
    if (atom != nullptr) return PyObject_CallOneArg(atom, value);
    if (PyErr_Occurred()) return nullptr;
    if (is_nest(value, 0)) return nest(side, value, path);
    if (!side.seen) {
      side.seen = Ref::steal(PyDict_New());
      if (!side.seen) return nullptr;
      for (auto [tensor, first] : side.met) {
        if (!note(side.seen.get(), tensor, first)) return nullptr;
      }
    }
    PyObject* arguments[] = {side.call, side.role, side.wanted, side.inputs, side.seen.get()};
    Ref encoder = Ref::steal(PyObject_Vectorcall(python_.encoder.get(), arguments, 5, nullptr));
    if (!encoder) return nullptr;
    PyObject* given[] = {value, encoder.get(), path};
    return PyObject_Vectorcall(python_.tree.get(), given, 3, nullptr);
  }

  // Whether a value is a tuple or a list of plain things, too shallow to be inside of itself.
  bool is_nest(PyObject* value, int depth) const {
    if (!PyTuple_CheckExact(value) && !PyList_CheckExact(value)) return false;
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(value);
    if (depth > MAX_DEPTH || count > MAX_ITEMS) return false;
    PyObject** items = PySequence_Fast_ITEMS(value);
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject* item = items[i];
      if (!is_own_type(item) && !is_written(item) && !is_nest(item, depth + 1)) return false;
    }
    return true;
  }

  // As `_sequence` of capture.encode.
  PyObject* nest(Side& side, PyObject* value, PyObject* path) {
    Ref trees = Ref::steal(PyList_New(0));
    if (!trees) return nullptr;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); ++i) {
      const Ref item = Ref::borrow(PySequence_Fast_GET_ITEM(value, i));
      Ref tree;
      if (is_written(item.get())) {
        tree = item;
      } else {
        const Ref last = Ref::steal(Py_BuildValue("(N)", PyUnicode_FromFormat("%zd", i)));
        const Ref below = last ? Ref::steal(PySequence_Concat(path, last.get())) : Ref();
        if (!below) return nullptr;
        tree = Ref::steal(argument(side, item.get(), below.get()));
      }
      if (!tree || PyList_Append(trees.get(), tree.get()) < 0) return nullptr;
    }
    if (PyList_CheckExact(value)) return trees.release();
    return Py_BuildValue("{s:O}", "tuple", trees.get());
  }

  // Whether a value is written as it is.
  bool is_written(PyObject* value) const {
    return value == Py_None || value == Py_True || value == Py_False || is_small(value);
  }

  PyObject* tensor_argument(Side& side, PyObject* tensor, PyObject* path) {
    Ref item = Ref::steal(PyTuple_Pack(2, tensor, path));
    if (!item || PyList_Append(side.inputs, item.get()) < 0) return nullptr;
    PyObject* first = nullptr;
    if (side.seen) {
      Ref key = Ref::steal(PyLong_FromVoidPtr(tensor));
      if (!key) return nullptr;
      first = PyDict_SetDefault(side.seen.get(), key.get(), path);
      if (first == nullptr) return nullptr;
      if (first == path) first = nullptr;
    } else {
      for (auto [other, at] : side.met) {
        if (other == tensor) first = at;
      }
      if (first == nullptr) side.met.emplace_back(tensor, path);
    }
    if (first == nullptr) {
      return encoded(tensor, side.call, side.role, path, side.wanted, Py_None);
    }
    PyObject* arguments[] = {tensor, side.call, side.role, path, first};
    return PyObject_Vectorcall(python_.repeated.get(), arguments, 5, nullptr);
  }

  static bool note(PyObject* seen, PyObject* tensor, PyObject* path) {
    Ref key = Ref::steal(PyLong_FromVoidPtr(tensor));
    return key && PyDict_SetDefault(seen, key.get(), path) != nullptr;
  }

  // Values that are written as they are, which `atoms` would give back.
  bool is_small(PyObject* value) const {
    if (PyLong_CheckExact(value)) {
      int overflow = 0;
      PyLong_AsLongLongAndOverflow(value, &overflow);
      return !overflow;
    }
    if (PyFloat_CheckExact(value)) return std::isfinite(PyFloat_AS_DOUBLE(value));
    return PyUnicode_CheckExact(value) && PyUnicode_GET_LENGTH(value) <= python_.max_text;
  }

  Ref contents_object_;  // keeps `contents_`
  Contents& contents_;
  Callbacks python_;
  std::unordered_map<uint64_t, std::vector<std::shared_ptr<const Head>>> heads_;
  size_t n_heads_ = 0;
  std::vector<int64_t> kind_;
};

}  // namespace tensorprobe
