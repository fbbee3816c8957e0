// The graph of a call that made one node, and hooks on nodes: what `follow.gradients` does of it.
#pragma once

#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <typeinfo>
#include <vector>

#include "asking.h"
#include "torch_versions.h"

namespace tensorprobe {

using torch::autograd::Node;
using torch::autograd::variable_list;
using NodePtr = std::decay_t<decltype(std::declval<torch::autograd::Edge>().function)>;

constexpr uint64_t LEAF = UINT64_MAX;  // sequence number of AccumulateGrad nodes

// A node that a call is left at in backward: where the gradients it sends to inputs are.
struct Exit {
  NodePtr node;
  std::vector<size_t> positions;  // in order
  std::vector<PyObject*> paths;   // borrowed of the inputs

  // As `Spot`s of Python.
  Ref spots() const {
    Ref spots = Ref::steal(PyTuple_New(paths.size()));
    if (!spots) throw python_error();
    for (size_t i = 0; i < paths.size(); ++i) {
      const auto position = static_cast<Py_ssize_t>(positions[i]);
      PyObject* spot = Py_BuildValue("(nOO)", position, paths[i], Py_None);
      if (spot == nullptr) throw python_error();
      PyTuple_SET_ITEM(spots.get(), i, spot);
    }
    return spots;
  }
};

// A call followed into backward, as hooks of its nodes hold it. `spots`, where they are given, are
// what its methods are told first, as in `follow.gradients.listen`.
class Listener {
 public:
  Listener(Ref backward, Ref spots, std::vector<size_t> positions)
      : backward_(std::move(backward)),
        spots_(std::move(spots)),
        positions_(std::move(positions)) {}

  virtual ~Listener() {  // in whatever thread the graph is freed
    if (!Py_IsInitialized()) {
      backward_.release();  // Python has gone, and its objects with it
      spots_.release();
      return;
    }
    pybind11::gil_scoped_acquire gil;
    backward_ = spots_ = Ref();
  }

  virtual void incoming(const variable_list& grads) {
    PyObject* const method = word<"incoming">();
    static const std::vector<size_t> first{0};
    call(method, grads, grads.empty() ? 0 : 1, first);
  }

  virtual void outgoing(const variable_list& grads) {
    PyObject* const method = word<"outgoing">();
    const size_t count = positions_.empty() ? 0 : positions_.back() + 1;
    call(method, grads, count, positions_);
  }

  // `backward` may be called as a hook of Python.
  virtual Ref python_hook() {
    Ref hook = Ref::borrow(backward_.get());
    if (spots_) hook = method<"hook">(hook, spots_.get());
    if (!hook) throw python_error();
    return hook;
  }

  // For compiled autograd, which takes hooks of Python.
  c10::SafePyObject as_hook() {
    pybind11::gil_scoped_acquire gil;
    return c10::SafePyObject(python_hook().release(), getPyInterpreter());
  }

 protected:
  Ref backward_;

 private:
  // The method, given as many gradients; those that it does not look at are None.
  void call(PyObject* method, const variable_list& grads, size_t count,
            const std::vector<size_t>& wanted) const {
    Ref tuple = Ref::steal(PyTuple_New(count));
    if (!tuple) throw python_error();
    for (size_t i = 0; i < count; ++i) PyTuple_SET_ITEM(tuple.get(), i, Py_NewRef(Py_None));
    for (size_t i : wanted) {
      if (i >= count || i >= grads.size() || !grads[i].defined()) continue;
      PyObject* grad = THPVariable_Wrap(grads[i]);
      if (grad == nullptr) throw python_error();
      PyTuple_SetItem(tuple.get(), i, grad);
    }
    PyObject* with_spots[] = {backward_.get(), spots_.get(), tuple.get()};
    PyObject* without[] = {backward_.get(), tuple.get()};
    Ref done = Ref::steal(spots_ ? PyObject_VectorcallMethod(method, with_spots, 3, nullptr)
                                 : PyObject_VectorcallMethod(method, without, 2, nullptr));
    if (!done) throw python_error();
  }

  Ref spots_;
  std::vector<size_t> positions_;  // in order
};

// Runs with the interpreter held; what Python raises goes on through the engine, as from its hooks.
template <typename Body>
void with_python(Body body) {
  pybind11::gil_scoped_acquire gil;
  try {
    body();
  } catch (python_error& error) {
    error.persist();
    throw;
  }
}

struct Incoming : torch::autograd::FunctionPreHook {
  explicit Incoming(std::shared_ptr<Listener> to) : listener(std::move(to)) {}

  variable_list operator()(const variable_list& grads) override {
    with_python([&] { listener->incoming(grads); });
    return grads;
  }
  COMPILED_ARGS(args) { args.add_pre_hook(listener->as_hook()); }

  std::shared_ptr<Listener> listener;
};

struct Outgoing : torch::autograd::FunctionPostHook {
  explicit Outgoing(std::shared_ptr<Listener> to) : listener(std::move(to)) {}

  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    with_python([&] { listener->outgoing(outputs); });
    return outputs;
  }
  COMPILED_ARGS(args) { args.add_post_hook(listener->as_hook()); }

  std::shared_ptr<Listener> listener;
};

// Whether a custom autograd.Function made the node. Its type is not exported, but has a name.
inline bool is_function(const Node& node) {
  static const std::type_info* found = nullptr;
  const std::type_info& type = typeid(node);
  if (&type == found) return true;
  if (std::strcmp(type.name(), "N5torch8autograd6PyNodeE") != 0) return false;
  found = &type;
  return true;
}

// The graph just before a call, as `follow.gradients.InputEdges`, of which it is the short form.
class Edges {
 public:
  Edges() : start_(at::sequence_number::peek()) {}

  // `inputs` is a list of (tensor, path).
  explicit Edges(PyObject* inputs) : Edges() {
    const Py_ssize_t count = PyList_GET_SIZE(inputs);
    inputs_.reserve(count);
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject* item = PyList_GET_ITEM(inputs, i);
      add(PyTuple_GET_ITEM(item, 0), PyTuple_GET_ITEM(item, 1));
    }
  }

  void expect(size_t count) { inputs_.reserve(count); }

  // Note one more input.
  void add(PyObject* object, PyObject* path) {
    if (!is_tensor(object)) return;
    const at::Tensor& tensor = tensor_in(object);
    Input input{Ref::borrow(object), Ref::borrow(path), tensor.unsafeGetTensorImpl()};
    input.needs = tensor.requires_grad();
    input.is_view = tensor.is_view() && !tensor.is_inference();
    if (input.is_view) input.version = tensor._version();
    if (input.needs) {
      input.node = tensor.grad_fn();
      if (input.node) {
        input.number = tensor.output_nr();
        has_functions_ = has_functions_ || is_function(*input.node);
      } else {
        has_leaves_ = true;
      }
      for (const Input& other : inputs_) {
        if (other.needs && other.node.get() == input.node.get() &&
            other.number == input.number && (input.node || other.impl == input.impl)) {
          has_aliases_ = true;
        }
      }
    }
    inputs_.push_back(std::move(input));
  }

  bool has_functions() const { return has_functions_; }
  bool has_leaves() const { return has_leaves_; }

  // What is to be found of a call that returned one tensor, whose node it is entered at in
  // backward: the spots of each node that it is left at, for `listen` to have them tell of it.
  // None where there is more to it, which `trace_call` finds. Where it `is_nested`, or left at
  // several nodes, it is for a `Backward`.
  PyObject* exits_of(PyObject* object) {
    if (!find_exits(object)) Py_RETURN_NONE;
    Ref all = Ref::steal(PyTuple_New(exits_.size()));
    if (!all) return nullptr;
    for (size_t i = 0; i < exits_.size(); ++i) {
      PyTuple_SET_ITEM(all.get(), i, exits_[i].spots().release());
    }
    return all.release();
  }

  // The same without telling of it.
  bool find_exits(PyObject* object) {
    const NodePtr first = own_node(object);
    if (!first || has_aliases_) return false;
    std::vector<Exit> exits;
    std::vector<PyObject*> paths;
    std::vector<NodePtr> todo{first}, seen{first};
    is_nested_ = false;
    while (!todo.empty()) {
      const NodePtr node = std::move(todo.back());
      todo.pop_back();
      Exit exit{node, {}, {}};
      const auto& edges = node->next_edges();
      for (size_t position = 0; position < edges.size(); ++position) {
        const auto& edge = edges[position];
        if (!edge.function) continue;
        PyObject* path = find(edge);
        if (path != nullptr) {
          if (PyTuple_GET_SIZE(path) != 1) is_nested_ = true;  // of a list of inputs
          // used twice, so that gradients add up
          if (std::find(paths.begin(), paths.end(), path) != paths.end()) return false;
          paths.push_back(path);
          exit.positions.push_back(position);
          exit.paths.push_back(path);
          continue;
        }
        const uint64_t sequence = edge.function->sequence_nr();
        if (sequence == LEAF || sequence < start_) continue;
        if (std::find(seen.begin(), seen.end(), edge.function) != seen.end()) continue;
        seen.push_back(edge.function);
        todo.push_back(edge.function);
      }
      if (!exit.paths.empty()) exits.push_back(std::move(exit));
    }
    if (exits.empty()) return false;
    if (exits.size() == 1 && !is_nested_ && !are_in_order(exits[0].paths)) return false;
    first_ = first;
    exits_ = std::move(exits);
    return true;
  }

  const std::vector<Exit>& exits() const { return exits_; }

  // Whether a gradient goes to a tensor inside of a list of inputs, as found by `exits_of`.
  bool is_nested() const { return is_nested_; }

  // Whether the call did no more than to hand this tensor on, as `output_nodes` notes it.
  bool is_handed_through(PyObject* object) const {
    const at::Tensor& output = tensor_in(object);
    const NodePtr node = output.grad_fn();
    for (const Input& input : inputs_) {
      if (!input.needs || input.node != node) continue;
      if (node ? input.number == output.output_nr()
               : input.impl == output.unsafeGetTensorImpl()) {
        return true;
      }
    }
    return node && node->sequence_nr() < start_;
  }

  // The node that the call made for this tensor; none where it only hands it on, or wrote to a
  // view, or the node has several results.
  NodePtr own_node(PyObject* object) const {
    if (!is_tensor(object)) return NodePtr();
    const at::Tensor& output = tensor_in(object);
    NodePtr node = output.grad_fn();
    if (!node || node->sequence_nr() < start_ || output.output_nr()) return NodePtr();
    for (const Input& input : inputs_) {
      const bool is_its_edge = input.needs && input.node == node && !input.number;
      const bool is_view = input.is_view && input.impl == output.unsafeGetTensorImpl();
      if (is_its_edge || is_view) return NodePtr();
    }
    return node;
  }

  // Keep the ways through a call for `listen`; the spots where it is left.
  PyObject* ways(const NodePtr& first, std::vector<Exit> exits) {
    Ref all = Ref::steal(PyTuple_New(exits.size()));
    if (!all) return nullptr;
    for (size_t i = 0; i < exits.size(); ++i) {
      PyTuple_SET_ITEM(all.get(), i, exits[i].spots().release());
    }
    keep(first, std::move(exits));
    return all.release();
  }

  void keep(const NodePtr& first, std::vector<Exit> exits) {
    first_ = first;
    exits_ = std::move(exits);
  }

  // Whether the call that was found has one node, at which it is entered and left.
  bool is_one_node() const { return exits_.size() == 1 && exits_[0].node == first_; }

  // Have the nodes that were found tell `backward`; with spots, where those of the output are
  // given.
  void listen(PyObject* backward, PyObject* output_spots) {
    TORCH_CHECK(first_, "nothing was found");
    const bool told = output_spots != Py_None;
    TORCH_CHECK(told || !exits_.empty(), "it is left nowhere");
    auto listener = std::make_shared<Listener>(Ref::borrow(backward),
                                               told ? Ref::borrow(output_spots) : Ref(),
                                               told ? std::vector<size_t>{} : exits_[0].positions);
    listen(std::move(listener), told ? backward : nullptr);
  }

  // Have them tell a listener; where a `backward` is given, each exit has one of its own for it.
  void listen(std::shared_ptr<Listener> listener, PyObject* backward = nullptr) {
    const NodePtr first = std::exchange(first_, NodePtr());
    const std::vector<Exit> exits = std::exchange(exits_, {});
    if (has_python_hooks(first->pre_hooks(), "N5torch8autograd17PyFunctionPreHookE")) {
      registered(torch::autograd::registerFunctionPreHook(*first, listener->python_hook().get()));
    } else {
      first->add_pre_hook(std::make_unique<Incoming>(listener));
    }
    for (const Exit& exit : exits) {
      if (backward != nullptr) {
        listener =
            std::make_shared<Listener>(Ref::borrow(backward), exit.spots(), exit.positions);
      }
      if (has_python_hooks(exit.node->post_hooks(), "N5torch8autograd18PyFunctionPostHookE")) {
        registered(
            torch::autograd::registerFunctionHook(*exit.node, listener->python_hook().get()));
      } else {
        exit.node->add_post_hook(std::make_unique<Outgoing>(listener));
      }
    }
  }

  // Python's hooks of a node are one hook, at the place of the first: one in C++ behind it would
  // run after those that Python registers later. The types are not exported, but have names.
  template <typename Hooks>
  static bool has_python_hooks(const Hooks& hooks, const char* name) {
    return std::any_of(hooks.begin(), hooks.end(), [&](const auto& hook) {
      const auto& one = *hook;
      return std::strcmp(typeid(one).name(), name) == 0;
    });
  }

  static void registered(PyObject* handle) {
    if (handle == nullptr) throw python_error();
    Py_DECREF(handle);
  }

  // The path of the input that an edge leads to, borrowed.
  PyObject* find(const torch::autograd::Edge& edge) const {
    const at::TensorImpl* leaf = nullptr;
    if (has_leaves_ && edge.function->sequence_nr() == LEAF) {
      auto* node = dynamic_cast<torch::autograd::AccumulateGrad*>(edge.function.get());
      if (node != nullptr) leaf = node->variable.unsafeGetTensorImpl();
    }
    for (const Input& input : inputs_) {
      if (!input.needs) continue;
      const bool leads_here = input.node ? input.node == edge.function &&
                                               input.number == edge.input_nr
                                         : input.impl == leaf;
      if (leads_here) return input.path.get();
    }
    return nullptr;
  }

  // Whether inputs hang at nodes that are younger than the call's beginning: those of another
  // thread, or of a view whose base was written to.
  bool has_young() const {
    for (const Input& input : inputs_) {
      if (input.node && input.node->sequence_nr() >= start_) return true;
    }
    return false;
  }

  // Whether a view was written to in the call, and is not one of the inputs at `paths`.
  bool lost_views(const std::vector<PyObject*>& paths) const {
    for (const Input& input : inputs_) {
      if (!input.is_view || !input.needs) continue;
      if (std::find(paths.begin(), paths.end(), input.path.get()) != paths.end()) continue;
      if (input.impl->version_counter().current_version() != input.version) return true;
    }
    return false;
  }

  uint64_t start() const { return start_; }
  bool has_aliases() const { return has_aliases_; }
  bool has_views() const {
    return std::any_of(inputs_.begin(), inputs_.end(),
                       [](const Input& input) { return input.is_view; });
  }

  // All that was noted: (start, [(tensor, path, needs, node, number, is view, version)]).
  PyObject* notes() const {
    Ref list = Ref::steal(PyList_New(inputs_.size()));
    if (!list) return nullptr;
    for (size_t i = 0; i < inputs_.size(); ++i) {
      const Input& input = inputs_[i];
      Ref node = input.node ? Ref::steal(torch::autograd::functionToPyObject(input.node))
                            : Ref::borrow(Py_None);
      if (!node) return nullptr;
      PyObject* note = Py_BuildValue(
          "(OOOOIOI)", input.tensor.get(), input.path.get(), input.needs ? Py_True : Py_False,
          node.get(), input.number, input.is_view ? Py_True : Py_False, input.version);
      if (note == nullptr) return nullptr;
      PyList_SET_ITEM(list.get(), i, note);
    }
    return Py_BuildValue("(KN)", static_cast<unsigned long long>(start_), list.release());
  }

 private:
  struct Input {
    Ref tensor, path;
    const at::TensorImpl* impl;
    NodePtr node;  // none of a leaf
    uint32_t number = 0;
    uint32_t version = 0;
    bool needs = false;
    bool is_view = false;
  };

  // Plain arguments, each once, as they come in the call's line. A position of two digits is not:
  // its text has another order than the number.
  static bool are_in_order(const std::vector<PyObject*>& paths) {
    PyObject* last = nullptr;
    for (PyObject* path : paths) {
      if (PyTuple_GET_SIZE(path) != 1) return false;
      PyObject* name = PyTuple_GET_ITEM(path, 0);
      const bool is_far =
          PyUnicode_GET_LENGTH(name) > 1 && Py_UNICODE_ISDIGIT(PyUnicode_READ_CHAR(name, 0));
      if (is_far || (last != nullptr && PyUnicode_Compare(name, last) <= 0)) return false;
      last = name;
    }
    return true;
  }

  uint64_t start_;
  std::vector<Input> inputs_;
  bool has_functions_ = false;
  bool has_leaves_ = false;
  bool has_aliases_ = false;
  bool is_nested_ = false;
  NodePtr first_;
  std::vector<Exit> exits_;
};

// The version of the tensor in (tensor, path); -1 of an inference tensor, which has none.
inline int64_t version_of(PyObject* item) {
  PyObject* object = PyTuple_GET_ITEM(item, 0);
  if (!is_tensor(object)) return -1;
  const auto& counter = tensor_in(object).unsafeGetTensorImpl()->version_counter();
  return counter.enabled() ? static_cast<int64_t>(counter.current_version()) : -1;
}

}  // namespace tensorprobe
