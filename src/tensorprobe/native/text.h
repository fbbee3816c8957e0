// Values as they are written in a line: as msgspec writes them, byte for byte.
#pragma once

#include <cmath>
#include <cstring>
#include <string>
#include <unordered_map>

#include "python.h"

namespace tensorprobe {

class Spell {
 public:
  // `encode` is msgspec's, which makes lines of a list: it is asked for all that is not simple.
  explicit Spell(Ref encode) : encode_(std::move(encode)) {}

  // Whether a text is written as it is.
  static bool is_simple(PyObject* text) {
    if (!PyUnicode_CheckExact(text) || !PyUnicode_IS_COMPACT_ASCII(text)) return false;
    const auto* data = reinterpret_cast<const unsigned char*>(PyUnicode_1BYTE_DATA(text));
    for (Py_ssize_t i = 0; i < PyUnicode_GET_LENGTH(text); ++i) {
      if (data[i] < 0x20 || data[i] > 0x7e || data[i] == '"' || data[i] == '\\') return false;
    }
    return true;
  }

  // A text with its quotes.
  std::string quoted(PyObject* text) const {
    if (!is_simple(text)) return json(text);
    std::string quoted;
    const Py_ssize_t length = PyUnicode_GET_LENGTH(text);
    quoted.reserve(length + 2);
    quoted += '"';
    quoted.append(reinterpret_cast<const char*>(PyUnicode_1BYTE_DATA(text)), length);
    quoted += '"';
    return quoted;
  }

  // Any value.
  std::string json(PyObject* value) const {
    Ref list = Ref::steal(PyList_New(1));
    if (!list) throw python_error();
    PyList_SET_ITEM(list.get(), 0, Py_NewRef(value));
    Ref bytes = Ref::steal(PyObject_CallOneArg(encode_.get(), list.get()));
    if (!bytes) throw python_error();
    TORCH_CHECK(PyBytes_Check(bytes.get()), "msgspec gave no bytes");
    return std::string(PyBytes_AS_STRING(bytes.get()), PyBytes_GET_SIZE(bytes.get()) - 1);
  }

  // As `record.encode` has it: JSON has no infinity.
  std::string number(double value) {
    if (!std::isfinite(value)) {
      const char* said = std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
      return "{\"float\":\"" + std::string(said) + "\"}";
    }
    uint64_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    auto known = numbers_.find(bits);
    if (known != numbers_.end()) return known->second;
    Ref object = Ref::steal(PyFloat_FromDouble(value));
    if (!object) throw python_error();
    std::string text = json(object.get());
    if (numbers_.size() >= MAX_NUMBERS) numbers_.clear();
    numbers_[bits] = text;
    return text;
  }

 private:
  static constexpr size_t MAX_NUMBERS = 1000;

  Ref encode_;
  std::unordered_map<uint64_t, std::string> numbers_;
};

// The last text that was asked for, as it is written: the same comes many times.
class Spoken {
 public:
  const std::string& of(const Spell& spell, const Ref& text) {
    if (text.get() != last_.get()) {
      std::string quoted = spell.quoted(text.get());
      last_ = text;
      quoted_ = std::move(quoted);
    }
    return quoted_;
  }

 private:
  Ref last_;
  std::string quoted_;
};

}  // namespace tensorprobe
