// ACL dump: what every operator read and wrote, a file each, as CANN lays them out: the length of a
// header, the header (a DumpData message of protobuf), the bytes of all inputs and all outputs.
//
//     {dump_path}/{time}/{device}/{OpType}.{OpName}.{task}.{stream}.{microseconds}
#include "machinery.h"
#include <chrono>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <regex>
#include <sstream>

extern "C" int aclrtGetDevice(int32_t* device);  // runtime.c
extern "C" int (*cann_set_dump)(const char* path);

namespace {
std::mutex guard;
bool is_on = false;
std::string mode = "output", folder;
long task = 0;

std::string field(const std::string& text, const std::string& name, const std::string& otherwise) {
  std::smatch found;
  std::regex pattern("\"" + name + "\"\\s*:\\s*\"([^\"]*)\"");
  return std::regex_search(text, found, pattern) ? found[1].str() : otherwise;
}

int set_dump(const char* path) {  // no path: the dump ends
  std::lock_guard<std::mutex> lock(guard);
  is_on = false;
  if (!path) return 0;
  std::ifstream file(path);
  std::stringstream read;
  read << file.rdbuf();
  auto text = read.str(), to = field(text, "dump_path", "");
  if (!file || to.empty()) return fail(100000, std::string("EP0001: ") + path + " names no dump_path");
  mode = field(text, "dump_mode", "output");
  char now[32];
  auto t = time(nullptr);
  strftime(now, sizeof now, "%Y%m%d%H%M%S", localtime(&t));
  folder = to + "/" + now;
  is_on = field(text, "dump_op_switch", "off") == "on";
  return 0;
}
struct AtLoading { AtLoading() { cann_set_dump = set_dump; } } at_loading;

// ---- protobuf -------------------------------------------------------------------------------------

std::string varint(uint64_t n) {
  std::string out;
  for (; n >= 128; n >>= 7) out += char(n & 127 | 128);
  return out + char(n);
}
std::string number(int id, uint64_t value) { return value ? varint(id << 3) + varint(value) : ""; }
std::string message(int id, const std::string& content) {
  return varint(id << 3 | 2) + varint(content.size()) + content;
}
int dump_type(int acl) {
  static const std::map<int, int> types = {{0, 1}, {1, 2}, {2, 3}, {3, 7}, {4, 4}, {6, 5}, {9, 8},
                                           {11, 12}, {12, 11}, {16, 16}, {17, 17}, {27, 27}};
  auto found = types.find(acl);
  return found == types.end() ? 0 : found->second;
}
// Inputs and outputs number their fields differently: the shape is 3 in both, the size is not.
std::string described(const aclTensor* t, size_t nbytes, bool is_input) {
  std::string dims;
  for (auto n : t->dims) dims += varint(n);
  auto shape = t->dims.empty() ? "" : message(1, dims);
  int size = is_input ? 5 : 6;
  return number(1, dump_type(t->dtype)) + number(2, 2) + message(3, shape) + number(size, nbytes) + message(size + 1, shape);
}
std::string bytes_of(const aclTensor* t) {
  auto dense = look(t).contiguous();
  return dense.numel() ? std::string((const char*)dense.data_ptr(), dense.nbytes()) : "";
}
}  // namespace

// What an operator reads, before it may be overwritten.
std::vector<std::string> dump_before(const std::vector<const aclTensor*>& reads) {
  std::vector<std::string> all;
  if (is_on && mode != "output")
    for (auto t : reads) all.push_back(t ? bytes_of(t) : "");
  return all;
}

void dump_after(const char* name, const std::vector<const aclTensor*>& reads, const std::vector<std::string>& read,
                const std::vector<const aclTensor*>& writes) {
  std::lock_guard<std::mutex> lock(guard);
  if (!is_on) return;
  std::string inputs, outputs, data;
  for (size_t i = 0; i < read.size(); i++)
    if (reads[i]) { inputs += message(4, described(reads[i], read[i].size(), true)); data += read[i]; }
  if (mode != "input")
    for (auto t : writes)
      if (t) {
        auto bytes = bytes_of(t);
        outputs += message(3, described(t, bytes.size(), false));
        data += bytes;
      }
  auto now = std::chrono::system_clock::now().time_since_epoch();
  auto us = std::chrono::duration_cast<std::chrono::microseconds>(now).count();
  std::string kind = name, op_name = "aclnn" + kind + "_" + kind;
  if (kind.rfind("Inplace", 0) == 0) kind = kind.substr(7);
  auto header = message(1, "2.0") + number(2, us) + outputs + inputs + message(6, op_name);
  int32_t device = 0;
  aclrtGetDevice(&device);
  auto place = std::filesystem::path(folder) / std::to_string(device);
  std::filesystem::create_directories(place);
  std::ofstream file(place / (kind + "." + op_name + "." + std::to_string(++task) + ".2." + std::to_string(us)), std::ios::binary);
  uint64_t length = header.size();
  file.write((const char*)&length, 8);
  file << header << data;
}
