// How an operator of CANN arrives, and what happens to it: used by the code that build.py makes of
// operators.txt, and by helpers.h.
#pragma once
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

struct aclTensor {
  std::vector<int64_t> dims, strides;
  int64_t offset;
  int dtype, format;
  void* data;
};
struct aclScalar { at::Scalar value; };
template <class T> struct List { std::vector<T> items; };
using Tensors = List<const aclTensor*>;

// What aclnnXGetWorkspaceSize hands to aclnnX.
struct aclOpExecutor {
  const char* name;
  std::vector<const aclTensor*> reads, writes;
  std::function<void()> work;
};

at::ScalarType type_of(int acl_type);
at::Tensor look(const aclTensor* tensor);  // a view of its memory; undefined for an absent one
void put(const aclTensor* to, const at::Tensor& result);
int fail(int code, const std::string& text);  // what aclGetRecentErrMsg says in this thread

inline std::vector<at::Tensor> look_all(const Tensors* list) {
  std::vector<at::Tensor> all;
  if (list)
    for (auto tensor : list->items) all.push_back(look(tensor));
  return all;
}
inline std::optional<at::Scalar> number(const aclScalar* s) {
  return s ? std::optional<at::Scalar>(s->value) : std::nullopt;
}
inline std::vector<at::Scalar> numbers(const List<const aclScalar*>* list) {
  std::vector<at::Scalar> all;
  for (auto s : list->items) all.push_back(s->value);
  return all;
}
template <class T> std::vector<T> copied(const List<T>* list) {
  return list ? list->items : std::vector<T>();
}

// Several results, each to its place; one that is not wanted has none.
template <size_t... I, class Tuple>
void put_each(std::index_sequence<I...>, const Tuple& results, const std::vector<const aclTensor*>& to) {
  (put(to.at(I), std::get<I>(results)), ...);
}
inline void put_results(const at::Tensor& result, const std::vector<const aclTensor*>& to) {
  put(to.at(0), result);
}
template <class... X>
void put_results(const std::tuple<X...>& results, const std::vector<const aclTensor*>& to) {
  put_each(std::index_sequence_for<X...>{}, results, to);
}
inline void put_results(const std::vector<at::Tensor>& results, const std::vector<const aclTensor*>& to) {
  TORCH_CHECK(results.size() == to.size(), results.size(), " results for ", to.size(), " places");
  for (size_t i = 0; i < to.size(); i++) put(to[i], results[i]);
}

inline void add_to(std::vector<const aclTensor*>& all, const aclTensor* tensor) { all.push_back(tensor); }
inline void add_to(std::vector<const aclTensor*>& all, const Tensors* list) {
  if (list) all.insert(all.end(), list->items.begin(), list->items.end());
}

int plan(const char* name, std::vector<const aclTensor*> reads, std::vector<const aclTensor*> writes,
         std::function<void()> work, uint64_t* workspace, aclOpExecutor** executor);
int run(aclOpExecutor* executor);
std::vector<std::string> dump_before(const std::vector<const aclTensor*>& reads);  // dump.cpp
void dump_after(const char* name, const std::vector<const aclTensor*>& reads, const std::vector<std::string>& read,
                const std::vector<const aclTensor*>& writes);
int absent(const char* name);
