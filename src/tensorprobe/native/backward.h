// A plain call followed into backward: what `record.backward.NodeBackward` and `WayBackward` do of
// the first pass through its graph, in the step of the call. Python does all others.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "gradients.h"

namespace tensorprobe {

// What is the same of all calls of an API.
struct Api {
  Ref api;  // ApiName, known by its address, so held
  bool is_plain = false;
  bool is_ascii = false;
  Ref before, after;                    // around the number, in a call's name
  std::string text_before, text_after;  // likewise in its line, with quotes
  std::string text_op;
  bool has_backward = false;  // it is a forward call
  Ref writes;                           // names of the arguments it writes to; null: of none
  mutable Ref counts, count;            // what gives numbers now, and what it is in
};

class Followed;

// Who writes down what comes by. Each says whether it did; if not, Python is to.
class Follower {
 public:
  virtual ~Follower() = default;
  virtual bool entered(Followed& call, const variable_list& grads) = 0;
  virtual bool left(Followed& call, const variable_list& grads) = 0;
  virtual Ref backward_of(const Followed& call) = 0;
};

class Followed : public Listener {
 public:
  // `owner` is the Python object that has the follower. The call is left at `exit`.
  Followed(Ref owner, Follower& follower, std::shared_ptr<const Api> api, long long number,
           Ref module, Ref stack, Ref step, const Exit& exit, bool is_way)
      : Listener(Ref(), Ref(), exit.positions),
        api(std::move(api)),
        number(number),
        module(std::move(module)),
        stack(std::move(stack)),
        step(std::move(step)),
        positions(exit.positions),
        is_way(is_way),
        owner_(std::move(owner)),
        follower_(follower) {
    for (PyObject* path : exit.paths) paths.push_back(Ref::borrow(path));
  }

  ~Followed() override {
    if (!Py_IsInitialized()) {
      for (Ref* ref : {&module, &stack, &step, &owner_}) ref->release();
      for (Ref& path : paths) path.release();
      new std::shared_ptr<const Api>(std::move(api));  // Python has gone, and its objects with it
      return;
    }
    pybind11::gil_scoped_acquire gil;
    module = stack = step = owner_ = Ref();
    paths.clear();
    api.reset();
  }

  void incoming(const variable_list& grads) override {
    if (!backward_ && follower_.entered(*this, grads)) return;
    python();
    Listener::incoming(grads);
  }

  void outgoing(const variable_list& grads) override {
    if (follower_.left(*this, grads)) return;
    python();
    Listener::outgoing(grads);
  }

  Ref python_hook() override {
    python();
    return Listener::python_hook();
  }

  bool is_in_python() const { return static_cast<bool>(backward_); }

  std::shared_ptr<const Api> api;
  const long long number;
  Ref module, stack, step;
  const std::vector<size_t> positions;
  std::vector<Ref> paths;
  const bool is_way;  // it is left at another node than it is entered at
  long n_passes = 0;

 private:
  void python() {  // it goes on there for good
    if (!backward_) backward_ = follower_.backward_of(*this);
  }

  Ref owner_;
  Follower& follower_;
};

}  // namespace tensorprobe
