// The graphs of modules inside of each other: what `follow.gradients.trace_module` walks.
#pragma once

#include <torch/csrc/autograd/python_function.h>

#include <deque>
#include <unordered_map>

#include "gradients.h"

namespace tensorprobe {

// The graph nodes that module calls made, since the outermost began.
class Regions {
 public:
  void clear() {  // what is freed may run Python, which may come back here
    const auto owners = std::exchange(owners_, {});
    const auto regions = std::exchange(regions_, {});
  }

  // Of a call with one result, the spots of its only way out, as `Edges::exits_of`; or what `walk`
  // gives, where there is more; None where the result has no node of its own to start at.
  // With `several`, of a call with any number of ways out and nothing to be said of them: how many
  // gradients each input gets that gets more than one, the number of nodes to listen at, and None.
  PyObject* only(Edges& edges, PyObject* output, bool leaves, bool several) {
    const NodePtr node = edges.own_node(output);
    if (!node) Py_RETURN_NONE;
    Region& own = walk(edges, {node}, nullptr, leaves);
    std::vector<std::pair<const Leaving*, PyObject*>> sent = sent_to(edges, own);
    const bool is_used = own.uses(node.get(), 0);
    if (sent.size() == 1 && !edges.has_aliases() && !is_used) {
      auto [leaving, path] = sent[0];
      if (PyTuple_GET_SIZE(path) == 1 && !edges.lost_views({path})) {
        return edges.ways(node, {Exit{leaving->from, {leaving->position}, {path}}});
      }
    }
    if (several && !edges.has_aliases() && !is_used) {
      std::vector<PyObject*> paths;
      for (auto [leaving, path] : sent) paths.push_back(path);
      if (!edges.lost_views(paths)) return kept(edges, node, sent, paths);
    }
    return told(own, sent);
  }

  // The call that made `nodes`; `ends` are the edges to its results, where there are several nodes.
  // Gives ([(node, spot)] of gradients sent to inputs, [edge] of results that are used inside).
  PyObject* walk_from(Edges& edges, PyObject* nodes, PyObject* ends, bool leaves) {
    std::vector<NodePtr> todo;
    std::vector<Used> used;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(nodes); ++i) {
      todo.push_back(node_in(PyList_GET_ITEM(nodes, i)));
    }
    for (Py_ssize_t i = 0; ends != Py_None && i < PyList_GET_SIZE(ends); ++i) {
      PyObject* edge = PyList_GET_ITEM(ends, i);
      TORCH_CHECK(PyTuple_CheckExact(edge) && PyTuple_GET_SIZE(edge) == 2, "not an edge");
      used.push_back({node_in(PyTuple_GetItem(edge, 0)),
                      static_cast<uint32_t>(PyLong_AsUnsignedLong(PyTuple_GetItem(edge, 1)))});
    }
    if (PyErr_Occurred()) throw python_error();
    Region& own = walk(edges, std::move(todo), ends == Py_None ? nullptr : &used, leaves);
    return told(own, sent_to(edges, own));
  }

  // The number by which torch knows the thread that has made a node.
  static uint64_t thread_of(PyObject* object) {
    const NodePtr node = node_in(object);
    return node ? node->thread_id() : 0;
  }

 private:
  static constexpr int64_t OF_LEAF = -1;

  struct Used {
    NodePtr node;
    uint32_t number;
  };

  // An edge that leaves a region, with the sequence number of the node it leads to.
  struct Leaving {
    int64_t sequence;
    torch::autograd::Edge edge;
    NodePtr from;
    size_t position;
  };

  struct Region {
    Region* parent = nullptr;
    std::vector<Leaving> leaving;
    std::vector<Used> used;  // edges inside that lead to results of the call, or a child's

    bool uses(const Node* node, uint32_t number) const {
      return std::any_of(used.begin(), used.end(), [&](const Used& one) {
        return one.node.get() == node && one.number == number;
      });
    }
    void use(const torch::autograd::Edge& edge) {
      if (!uses(edge.function.get(), edge.input_nr)) used.push_back({edge.function, edge.input_nr});
    }
  };

  static NodePtr node_in(PyObject* object) {
    if (torch::autograd::THPCppFunction_Check(object)) {
      return reinterpret_cast<torch::autograd::THPCppFunction*>(object)->cdata;
    }
    TORCH_CHECK(THPFunction_Check(object), "not a node of the graph");
    return held(reinterpret_cast<THPFunction*>(object)->cdata);
  }

  // A custom autograd.Function holds its node, or in torch 2.11 knows it.
  template <typename Pointer>
  static NodePtr held(const Pointer& node) {
    if constexpr (requires { node.owner_before(node); }) {
      return node.lock();
    } else {
      return node;
    }
  }

  static bool leads_to(const std::vector<Used>* ends, const torch::autograd::Edge& edge) {
    return ends != nullptr && std::any_of(ends->begin(), ends->end(), [&](const Used& end) {
             return end.node == edge.function && end.number == edge.input_nr;
           });
  }

  Region& walk(const Edges& edges, std::vector<NodePtr> todo, const std::vector<Used>* ends,
               bool leaves) {
    Region& own = regions_.emplace_back();
    const auto start = static_cast<int64_t>(edges.start());
    const bool young = edges.has_young();
    while (!todo.empty()) {
      const NodePtr node = std::move(todo.back());
      todo.pop_back();
      const uint64_t number = node->sequence_nr();
      auto found = owners_.find(number);
      if (found != owners_.end()) {
        for (Leaving& place : join(found->second, own)) {
          if (leads_to(ends, place.edge)) own.use(place.edge);
          if (place.sequence >= start && !(young && edges.find(place.edge))) {
            todo.push_back(place.edge.function);
          } else {
            own.leaving.push_back(std::move(place));
          }
        }
        continue;
      }
      owners_[number] = &own;
      const auto& next = node->next_edges();
      for (size_t position = 0; position < next.size(); ++position) {
        const auto& edge = next[position];
        if (!edge.function) continue;
        const uint64_t sequence = edge.function->sequence_nr();
        if (sequence == LEAF) {
          if (leaves) own.leaving.push_back({OF_LEAF, edge, node, position});
          continue;
        }
        if (leads_to(ends, edge)) own.use(edge);
        if (static_cast<int64_t>(sequence) >= start && !(young && edges.find(edge))) {
          todo.push_back(edge.function);
        } else {
          own.leaving.push_back({static_cast<int64_t>(sequence), edge, node, position});
        }
      }
    }
    return own;
  }

  // Make a finished child's region part of its caller's; the edges that left it.
  static std::vector<Leaving> join(Region* region, Region& own) {
    while (region->parent != nullptr) region = region->parent;
    if (region == &own) return {};
    region->parent = &own;
    for (const Used& one : region->used) {
      if (!own.uses(one.node.get(), one.number)) own.used.push_back(one);
    }
    region->used.clear();
    return std::exchange(region->leaving, {});
  }

  // As `Trace.contributions` and `listen` of capture.gradients; the edges keep the ways.
  static PyObject* kept(Edges& edges, const NodePtr& first,
                        const std::vector<std::pair<const Leaving*, PyObject*>>& sent,
                        const std::vector<PyObject*>& paths) {
    std::vector<Exit> exits;
    for (auto [leaving, path] : sent) {
      auto exit = std::find_if(exits.begin(), exits.end(), [from = leaving->from](const Exit& one) {
        return one.node == from;
      });
      if (exit == exits.end()) exit = exits.insert(exit, Exit{leaving->from, {}, {}});
      exit->positions.push_back(leaving->position);
      exit->paths.push_back(path);
    }
    std::vector<std::pair<PyObject*, Py_ssize_t>> more;  // by path, of more than one
    for (const Exit& exit : exits) {
      for (PyObject* path : exit.paths) {
        const auto count = std::count(paths.begin(), paths.end(), path);
        const bool is_new = std::none_of(more.begin(), more.end(),
                                         [&](const auto& one) { return one.first == path; });
        if (count > 1 && is_new) more.emplace_back(path, count);
      }
    }
    const auto n_nodes = static_cast<Py_ssize_t>(1 + exits.size());
    edges.keep(first, std::move(exits));
    Ref contributions = Ref::steal(PyDict_New());
    if (!contributions) return nullptr;
    for (auto [path, count] : more) {
      Ref number = Ref::steal(PyLong_FromSsize_t(count));
      if (!number || PyDict_SetItem(contributions.get(), path, number.get()) < 0) return nullptr;
    }
    return Py_BuildValue("(OnO)", contributions.get(), n_nodes, Py_None);
  }

  static std::vector<std::pair<const Leaving*, PyObject*>> sent_to(const Edges& edges,
                                                                   const Region& own) {
    std::vector<std::pair<const Leaving*, PyObject*>> sent;
    for (const Leaving& leaving : own.leaving) {
      PyObject* path = edges.find(leaving.edge);
      if (path != nullptr) sent.emplace_back(&leaving, path);
    }
    return sent;
  }

  static PyObject* told(const Region& own,
                        const std::vector<std::pair<const Leaving*, PyObject*>>& sent) {
    // Copied: any object that is made may have the garbage collector run Python, which may come
    // back here and `clear`.
    std::vector<std::tuple<NodePtr, Py_ssize_t, PyObject*>> places;
    for (auto [leaving, path] : sent) places.emplace_back(leaving->from, leaving->position, path);
    const std::vector<Used> all_used = own.used;
    Ref list = Ref::steal(PyList_New(0)), used = Ref::steal(PyList_New(0));
    if (!list || !used) return nullptr;
    for (const auto& [from, position, path] : places) {
      PyObject* node = torch::autograd::functionToPyObject(from);
      Ref item = Ref::steal(Py_BuildValue("(N(nOO))", node, position, path, Py_None));
      if (!item || PyList_Append(list.get(), item.get()) < 0) return nullptr;
    }
    for (const Used& one : all_used) {
      Ref item = Ref::steal(
          Py_BuildValue("(NI)", torch::autograd::functionToPyObject(one.node), one.number));
      if (!item || PyList_Append(used.get(), item.get()) < 0) return nullptr;
    }
    return PyTuple_Pack(2, list.get(), used.get());
  }

  std::deque<Region> regions_;
  std::unordered_map<uint64_t, Region*> owners_;
};

}  // namespace tensorprobe
