// Runs an operator on the memory of the host, with the faults that were planted.
#include "machinery.h"
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>

extern "C" void cann_say(const char* text);          // runtime.c
extern "C" void cann_break_device(int code, const char* name);
extern "C" int cann_device_error(void);
extern "C" int cann_saturates(void);
extern "C" void cann_raise_overflow(void);
extern "C" int (*cann_spoil_result)(const char*, void*, uint64_t, int);  // hccl.c

at::ScalarType type_of(int t) {  // aclDataType
  switch (t) {
    case 0: return at::kFloat;
    case 1: return at::kHalf;
    case 2: return at::kChar;
    case 3: return at::kInt;
    case 4: return at::kByte;
    case 6: return at::kShort;
    case 9: return at::kLong;
    case 11: return at::kDouble;
    case 12: return at::kBool;
    case 16: return at::kComplexFloat;
    case 17: return at::kComplexDouble;
    case 27: return at::kBFloat16;
  }
  throw std::runtime_error("the stand-in for CANN has no aclDataType " + std::to_string(t));
}

at::Tensor look(const aclTensor* t) {
  if (!t) return {};
  auto type = type_of(t->dtype);
  auto first = (char*)t->data + t->offset * at::elementSize(type);
  return at::from_blob(first, t->dims, t->strides, at::TensorOptions().dtype(type));
}

void put(const aclTensor* to, const at::Tensor& result) {
  if (!to || !result.defined() || !result.numel()) return;
  auto place = look(to);
  TORCH_CHECK(result.numel() == place.numel(), "a result of shape ", result.sizes(),
              " where the caller has room for ", place.sizes());
  place.copy_(result.reshape(place.sizes()));  // also casts
}

int fail(int code, const std::string& text) { cann_say(text.c_str()); return code; }

int absent(const char* name) {
  return fail(161001, std::string("the stand-in for CANN has no operator ") + name +
                          ": a line for it goes into tests/npu/cann/operators.txt");
}

// ---- faults ---------------------------------------------------------------------------------------

namespace {
struct Fault { std::string op, effect; double value; long at, seen; };
std::vector<Fault> faults;
std::mutex guard;

// "Gelu=scale:1.01;Mm@2=nan": the third Mm gives one NaN. Effects: scale:X, nan, inf, permute,
// raise (the launch fails), error:CODE (the device fails while it computes).
void read_faults(const char* text) {
  std::lock_guard<std::mutex> lock(guard);
  faults.clear();
  std::stringstream all(text ? text : "");
  for (std::string one; std::getline(all, one, ';');) {
    auto equals = one.find('='), at = one.find('@');
    TORCH_CHECK(equals != std::string::npos, "a fault is NAME=EFFECT or NAME@N=EFFECT, not ", one);
    auto colon = one.find(':', equals);
    Fault f{one.substr(0, std::min(at, equals)), one.substr(equals + 1, colon - equals - 1), 0, -1, 0};
    if (at < equals) f.at = std::stol(one.substr(at + 1));
    if (colon != std::string::npos) f.value = std::stod(one.substr(colon + 1));
    static const char* known[] = {"scale", "nan", "inf", "permute", "raise", "error"};
    TORCH_CHECK(std::count(std::begin(known), std::end(known), f.effect), "no effect ", f.effect,
                " of a fault; there are scale:X, nan, inf, permute, raise, error:CODE");
    faults.push_back(f);
  }
}
struct AtStart { AtStart() { if (auto text = getenv("CANN_FAULTS")) read_faults(text); } } at_start;

std::vector<Fault> faults_of(const std::string& name) {
  std::lock_guard<std::mutex> lock(guard);
  std::vector<Fault> now;
  for (auto& f : faults)
    if (f.op == name) {
      if (f.at < 0 || f.at == f.seen) now.push_back(f);
      f.seen++;
    }
  return now;
}

void spoil(const Fault& fault, const std::vector<const aclTensor*>& writes) {
  at::Tensor out;  // the largest floating-point result
  for (auto to : writes) {
    auto one = look(to);
    if (one.defined() && one.is_floating_point() && one.numel() && (!out.defined() || one.numel() > out.numel())) out = one;
  }
  if (!out.defined()) return;
  if (fault.effect == "scale") out.mul_(fault.value);
  else if (fault.effect == "permute") { if (out.dim()) out.copy_(out.flip(-1)); }
  else {
    auto first = out;
    while (first.dim()) first = first.select(0, 0);
    first.fill_(fault.effect == "nan" ? NAN : INFINITY);
  }
}

void saturate(const std::vector<const aclTensor*>& writes) {  // as chips do that know no infinity
  for (auto to : writes) {
    auto out = look(to);
    if (!out.defined() || !out.is_floating_point() || at::isfinite(out).all().item<bool>()) continue;
    cann_raise_overflow();
    out.copy_(at::nan_to_num(out, 0.0));
  }
}
}  // namespace

extern "C" const char* cann_plant(const char* text) {  // what is wrong with the text, or nothing
  static thread_local std::string wrong;
  try { read_faults(text); return nullptr; }
  catch (const c10::Error& e) { wrong = e.what_without_backtrace(); }
  catch (const std::exception& e) { wrong = e.what(); }
  return wrong.c_str();
}

// ---- one operator ---------------------------------------------------------------------------------


std::map<std::string, long> runs;  // of every operator

int plan(const char* name, std::vector<const aclTensor*> reads, std::vector<const aclTensor*> writes,
         std::function<void()> work, uint64_t* workspace, aclOpExecutor** executor) {
  *workspace = 0;
  *executor = new aclOpExecutor{name, std::move(reads), std::move(writes), std::move(work)};
  return 0;
}

// On torch_npu's queue thread, or on the caller's: none of the caller's modes may see the CPU kernels.
int run(aclOpExecutor* executor) {
  std::unique_ptr<aclOpExecutor> op(executor);
  auto modes = c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
               c10::python_ks | c10::DispatchKeySet(c10::DispatchKey::Functionalize);
  c10::impl::ForceDispatchKeyGuard keys(c10::default_included_set, c10::default_excluded_set | modes);
  at::DisableRecordFunctionGuard quiet;
  { std::lock_guard<std::mutex> lock(guard); runs[op->name]++; }
  if (cann_device_error()) return 0;  // taken, and never run: who waits for the device is told
  try {
    auto planted = faults_of(op->name);
    for (auto& f : planted)
      if (f.effect == "raise")
        return fail(561103, std::string("EZ9999: Inner Error!\nEZ9999: aclnn") + op->name + ": planted");
    auto read = dump_before(op->reads);
    op->work();
    for (auto& f : planted) {
      if (f.effect == "error") cann_break_device((int)f.value, op->name);
      else spoil(f, op->writes);
    }
    if (cann_saturates()) saturate(op->writes);
    dump_after(op->name, op->reads, read, op->writes);
  } catch (const c10::Error& error) {
    return fail(561000, std::string("aclnn") + op->name + ": " + error.what_without_backtrace());
  } catch (const std::exception& error) {
    return fail(561000, std::string("aclnn") + op->name + ": " + error.what());
  }
  return 0;
}

// The result of a collective; the types are HCCL's.
static int spoil_collective(const char* name, void* data, uint64_t count, int hccl_type) {
  { std::lock_guard<std::mutex> lock(guard); runs[name]++; }
  static const std::map<int, int> floats = {{3, 1}, {4, 0}, {10, 11}, {11, 27}};
  auto type = floats.find(hccl_type);
  for (auto& f : faults_of(name)) {
    if (f.effect == "raise") return fail(4, std::string("EI9999: Inner Error!\nEI9999: ") + name + ": planted");
    if (f.effect == "error") cann_break_device((int)f.value, name);
    else if (type != floats.end()) {
      aclTensor result{{(int64_t)count}, {1}, 0, type->second, 2, data};
      spoil(f, {&result});
    }
  }
  return 0;
}
static struct AtLoading { AtLoading() { cann_spoil_result = spoil_collective; } } at_loading;

extern "C" const char* cann_ran(void) {  // "Add 3\nMm 1\n"
  static thread_local std::string text;
  std::lock_guard<std::mutex> lock(guard);
  text.clear();
  for (auto& [name, count] : runs) text += name + " " + std::to_string(count) + "\n";
  return text.c_str();
}

// ---- what operators take --------------------------------------------------------------------------

extern "C" {
aclTensor* aclCreateTensor(const int64_t* dims, uint64_t n, int dtype, const int64_t* strides,
                           int64_t offset, int format, const int64_t*, uint64_t, void* data) {
  return new aclTensor{{dims, dims + n}, {strides, strides + n}, offset, dtype, format, data};
}
int aclDestroyTensor(const aclTensor* t) { delete t; return 0; }
aclScalar* aclCreateScalar(void* value, int dtype) {
  return new aclScalar{at::from_blob(value, {}, at::TensorOptions().dtype(type_of(dtype))).item()};
}
int aclDestroyScalar(const aclScalar* s) { delete s; return 0; }
void* aclCreateIntArray(const int64_t* v, uint64_t n) { return new List<int64_t>{{v, v + n}}; }
int aclDestroyIntArray(const List<int64_t>* a) { delete a; return 0; }
void* aclCreateFloatArray(const float* v, uint64_t n) { return new List<float>{{v, v + n}}; }
int aclDestroyFloatArray(const List<float>* a) { delete a; return 0; }
void* aclCreateBoolArray(const bool* v, uint64_t n) { return new List<char>{{v, v + n}}; }
int aclDestroyBoolArray(const List<char>* a) { delete a; return 0; }
void* aclCreateTensorList(const aclTensor* const* v, uint64_t n) { return new Tensors{{v, v + n}}; }
int aclDestroyTensorList(const Tensors* a) {  // owns its tensors
  for (auto t : a->items) delete t;
  delete a;
  return 0;
}
void* aclCreateScalarList(const aclScalar* const* v, uint64_t n) { return new List<const aclScalar*>{{v, v + n}}; }
int aclDestroyScalarList(const List<const aclScalar*>* a) {
  for (auto s : a->items) delete s;
  delete a;
  return 0;
}
int aclGetViewShape(const aclTensor* t, int64_t** dims, uint64_t* n) {
  *n = t->dims.size();
  *dims = new int64_t[*n + 1];
  std::copy(t->dims.begin(), t->dims.end(), *dims);
  return 0;
}
int aclDestroyAclOpExecutor(aclOpExecutor* e) { delete e; return 0; }
}
