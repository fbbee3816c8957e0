// Memory that torch's operations write to, in whatever thread and from whatever language.
#pragma once

#include <ATen/record_function.h>
#include <pthread.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace tensorprobe {

// While it watches, notes what is written to. A write through `.data` moves the version of that
// tensor and of no other; here it shows in the memory. It is noted before the operation begins. Of
// torch's own, those may write that end in `_` and overloads with `out`. Takes no lock of Python's,
// which a thread that waits for this one may hold.
class Writes {
 public:
  ~Writes() { watch(false); }
  Writes() = default;
  Writes(const Writes&) = delete;

  void watch(bool on) {
    const std::lock_guard<std::mutex> lock(all().mutex);
    if (on == is_watching_) return;
    is_watching_ = on;
    if (on) {
      all().watching.push_back(this);
    } else {
      std::erase(all().watching, this);
      written_.clear();
      any_.store(false, std::memory_order_relaxed);
    }
    if (on && all().watching.size() == 1) {
      auto callback = at::RecordFunctionCallback(&Writes::begins).needsInputs(true);
      all().handle = at::addGlobalCallback(callback.scopes({at::RecordScope::FUNCTION}));
    } else if (!on && all().watching.empty()) {
      at::removeCallback(all().handle);
    }
  }

  // Whether there is something to take.
  bool any() const { return any_.load(std::memory_order_acquire); }

  std::unordered_set<const c10::StorageImpl*> take() {
    const std::lock_guard<std::mutex> lock(all().mutex);
    any_.store(false, std::memory_order_relaxed);
    return std::exchange(written_, {});
  }

 private:
  static std::unique_ptr<at::ObserverContext> begins(const at::RecordFunction& function) {
    const char *name = function.name(), *overload = function.overload_name();
    const size_t length = std::strlen(name);
    const bool may_write = (length && name[length - 1] == '_') || std::strstr(overload, "out") ||
                           std::strncmp(name, "aten::", 6);
    if (!may_write) return nullptr;
    const auto inputs = function.inputs();
    const std::lock_guard<std::mutex> lock(all().mutex);
    for (size_t i : written_by(function, std::string(name) + '.' + overload)) {
      if (i >= inputs.size()) break;
      const c10::IValue& value = inputs[i];
      if (value.isTensor()) {
        note(value.toTensor());
      } else if (value.isTensorList()) {
        for (const at::Tensor& tensor : value.toTensorVector()) note(tensor);
      }
    }
    return nullptr;
  }

  // Which of its arguments an operator writes to, as its schema says.
  static const std::vector<size_t>& written_by(const at::RecordFunction& function,
                                               const std::string& name) {
    auto known = all().written_by.find(name);
    if (known == all().written_by.end()) {
      std::vector<size_t> found;
      if (const auto schema = function.operator_schema()) {
        for (size_t i = 0; i < schema->arguments().size(); ++i) {
          const auto* alias = schema->arguments()[i].alias_info();
          if (alias != nullptr && alias->isWrite()) found.push_back(i);
        }
      }
      known = all().written_by.emplace(name, std::move(found)).first;
    }
    return known->second;
  }

  static void note(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.has_storage()) return;
    const auto* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    for (Writes* each : all().watching) {
      each->written_.insert(storage);
      each->any_.store(true, std::memory_order_release);
    }
  }

  // What all of them share; for ever, as threads may outlive what is static.
  struct All {
    std::mutex mutex;
    std::vector<Writes*> watching;
    at::CallbackHandle handle = 0;
    std::unordered_map<std::string, std::vector<size_t>> written_by;
  };
  static All& all() {
    static All* const made = [] {
      // no process is forked while a thread has the lock: in the child nobody would give it back
      pthread_atfork([] { all().mutex.lock(); }, [] { all().mutex.unlock(); },
                     [] { all().mutex.unlock(); });
      return new All;
    }();
    return *made;
  }

  std::unordered_set<const c10::StorageImpl*> written_;
  std::atomic<bool> any_ = false;
  bool is_watching_ = false;
};

}  // namespace tensorprobe
