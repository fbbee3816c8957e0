// Memory that torch's operations write to, in whatever thread and from whatever language.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "torch_versions.h"

namespace tensorprobe {

// While it watches, notes what is written to, as the schemas of operators say. A write through
// `.data` moves the version of that tensor and of no other; here it shows in the memory. It is noted
// before the operation begins. Takes no lock of Python's, which a thread that waits for this one may
// hold.
class Writes {
 public:
  ~Writes() { watch(false); }
  Writes() = default;
  Writes(const Writes&) = delete;

  void watch(bool on) {
    All& shared = all();
    const std::lock_guard<std::mutex> lock(shared.mutex);
    auto& watching = shared.watching;
    if (on == (std::find(watching.begin(), watching.end(), this) != watching.end())) return;
    if (on) {
      watching.push_back(this);
    } else {
      std::erase(watching, this);
      written_.clear();
      any_.store(false, std::memory_order_relaxed);
    }
    if (on && !shared.handle) {
      auto callback = at::RecordFunctionCallback(&Writes::begins).needsInputs(true);
      shared.handle = at::addGlobalCallback(callback.scopes({at::RecordScope::FUNCTION}));
    } else if (watching.empty() && !shared.is_child) {
      at::removeCallback(std::exchange(shared.handle, 0));
    }
  }

  // Whether there is something to take.
  bool any() const { return any_.load(std::memory_order_acquire); }

  // Whether a GradScaler has ever updated its scale.
  bool saw_scaler() const { return saw_scaler_.load(std::memory_order_relaxed); }

  std::unordered_set<const c10::StorageImpl*> take() {
    const std::lock_guard<std::mutex> lock(all().mutex);
    any_.store(false, std::memory_order_relaxed);
    return std::exchange(written_, {});
  }

 private:
  using Storages = c10::SmallVector<const c10::StorageImpl*, 4>;

  static std::unique_ptr<at::ObserverContext> begins(const at::RecordFunction& function) {
    if (!may_write(function)) return nullptr;
    const auto name = function.operator_name();
    if (!name) return nullptr;  // no operator
    const auto found = c10::Dispatcher::singleton().findSchema(*name);
    if (!found) return nullptr;
    const auto& arguments = found->schema().arguments();
    auto inputs = function.inputs();
    if (inputs.size() < arguments.size()) return nullptr;
    // TorchScript shows all of its stack, at the end of which are the arguments
    inputs = inputs.slice(inputs.size() - arguments.size());
    // the schemas of collectives do not say what they write to
    const bool may_be_any = !std::strncmp(function.name(), "c10d::", 6);
    Storages storages;
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (may_be_any || is_written(arguments[i])) collect(inputs[i], storages);
    }
    if (const Statistics* known = statistics_of(function.name())) {
      const bool trains = known->training < 0 || inputs[known->training].toBool();
      for (int i = known->first; trains && i < known->first + 2; ++i) collect(inputs[i], storages);
    }
    const bool by_scaler = !std::strcmp(function.name(), "aten::_amp_update_scale_");
    if (!storages.empty()) note(storages, by_scaler);
    return nullptr;
  }

  // Operators that update running statistics, of which their schemas do not tell: where those are
  // among the arguments, and what says whether they are updated (-1: always).
  struct Statistics {
    const char* name;
    int first, training;
  };
  static constexpr Statistics STATISTICS[] = {
      {"aten::native_batch_norm", 3, 5},
      {"aten::cudnn_batch_norm", 3, 5},
      {"aten::miopen_batch_norm", 3, 5},
      {"aten::batch_norm_update_stats", 1, -1},
      {"aten::batch_norm_gather_stats", 3, -1},
      {"aten::batch_norm_gather_stats_with_counts", 3, -1},
  };
  static const Statistics* statistics_of(const std::string_view name) {
    for (const Statistics& each : STATISTICS) {
      if (name == each.name) return &each;
    }
    return nullptr;
  }

  // Of torch's own most that write end in `_`, or have an overload with `out`.
  static bool may_write(const at::RecordFunction& function) {
    const std::string_view name = function.name();
    if (name.ends_with('_') || overload_has(function, "out")) return true;
    return !name.starts_with("aten::") || all().others.count(name);
  }

  static bool is_written(const c10::Argument& argument) {
    return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
  }

  static void collect(const c10::IValue& value, Storages& storages) {
    if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      if (!tensor.defined() || !tensor.has_storage()) return;
      storages.push_back(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
    } else if (value.isList()) {
      for (const c10::IValue& each : value.toListRef()) collect(each, storages);
    }
  }

  static void note(const Storages& storages, bool by_scaler) {
    const std::lock_guard<std::mutex> lock(all().mutex);
    for (Writes* each : all().watching) {
      each->written_.insert(storages.begin(), storages.end());
      each->any_.store(true, std::memory_order_release);
      if (by_scaler) each->saw_scaler_.store(true, std::memory_order_relaxed);
    }
  }

  // What all of them share; for ever, as threads may outlive what is static.
  struct All {
    std::mutex mutex;
    std::vector<Writes*> watching;
    at::CallbackHandle handle = 0;
    bool is_child = false;  // a forked one: it keeps the callback it has
    // the operators of torch that write, and whose names do not say so
    std::vector<std::string> names;
    std::unordered_set<std::string_view> others;

    All() {
      auto& dispatcher = c10::Dispatcher::singleton();
      for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
        if (!name.name.starts_with("aten::") || name.name.ends_with('_')) continue;
        if (name.overload_name.find("out") != std::string::npos) continue;
        const auto found = dispatcher.findSchema(name);
        if (found && std::any_of(found->schema().arguments().begin(),
                                 found->schema().arguments().end(), is_written)) {
          names.push_back(name.name);
        }
      }
      others.insert(names.begin(), names.end());
      for (const Statistics& each : STATISTICS) others.insert(each.name);
    }
  };
  static All& all() {
    static All* const made = [] {
      // No process is forked while a thread has the lock: in the child nobody would give it back.
      // Torch has one of its own, which each thread takes with its first operation after a callback
      // has come or gone: the thread that forks does so now, and the child not any more.
      // Nothing of what a child does is wanted.
      pthread_atfork(
          [] {
            all().mutex.lock();
            at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
          },
          [] { all().mutex.unlock(); },
          [] {
            all().watching.clear();
            all().is_child = all().handle != 0;
            all().mutex.unlock();
          });
      return new All;
    }();
    return *made;
  }

  std::unordered_set<const c10::StorageImpl*> written_;
  std::atomic<bool> any_ = false, saw_scaler_ = false;
};

}  // namespace tensorprobe
