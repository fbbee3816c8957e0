// A line of the log as text: its fields, and their order, are those of a struct in store/lines.py.
#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <numeric>
#include <string>
#include <vector>

#include "asking.h"

namespace tensorprobe {

inline void append_number(std::string& text, long long number) {
  char digits[24];
  const auto end = std::to_chars(digits, digits + sizeof digits, number).ptr;
  text.append(digits, end - digits);
}

// What the lines of one struct of Python have in common. C++ knows a field by its place among
// `names`; where that is in a line, the struct says.
class LineForm {
 public:
  static constexpr size_t MOST = 16;

  LineForm(const Ref& line, std::initializer_list<const char*> names) {
    const Ref config = attribute<"__struct_config__">(line);
    const Ref fields = attribute<"__struct_fields__">(line);
    TORCH_CHECK(names.size() <= MOST, "too many fields");
    opening = "{\"" + said(attribute<"tag_field">(config)) + "\":\"" +
              said(attribute<"tag">(config)) + "\"";
    for (const char* name : names) {
      const Ref text = must(PyUnicode_FromString(name));
      const Py_ssize_t place = PySequence_Index(fields.get(), text.get());
      if (place < 0) throw python_error();
      places.push_back(place);
      keys.push_back(",\"" + std::string(name) + "\":");
    }
  }

  std::string opening;
  std::vector<Py_ssize_t> places;
  std::vector<std::string> keys;

 private:
  static std::string said(const Ref& text) {
    const char* utf8 = PyUnicode_AsUTF8(text.get());
    if (utf8 == nullptr) throw python_error();
    return utf8;
  }
};

// One line. Its fields may be written in any order, each once and at most.
class LineText {
 public:
  LineText(const LineForm& form, size_t expected) : form_(form) { text_.reserve(expected); }

  // Begins a field: its value is to be added to the text.
  std::string& field(size_t which) {
    const Py_ssize_t place = form_.places[which];
    if (count_ && place < parts_[count_ - 1].place) is_in_order_ = false;
    parts_[count_++] = {place, text_.size(), text_.size() + form_.keys[which].size()};
    return text_ += form_.keys[which];
  }

  // The value of a field; `null` of one that was not begun.
  std::string value(size_t which) const {
    for (size_t i = 0; i < count_; ++i) {
      if (parts_[i].place != form_.places[which]) continue;
      return text_.substr(parts_[i].value, end_of(i) - parts_[i].value);
    }
    return "null";
  }

  // With its newline; nothing may be added any more.
  std::string finish() {
    std::string line;
    line.reserve(form_.opening.size() + text_.size() + 2);
    line += form_.opening;
    if (is_in_order_) {
      line += text_;
    } else {
      std::array<uint8_t, LineForm::MOST> order;
      std::iota(order.begin(), order.begin() + count_, 0);
      std::sort(order.begin(), order.begin() + count_,
                [&](size_t one, size_t other) { return parts_[one].place < parts_[other].place; });
      for (size_t i = 0; i < count_; ++i) {
        const size_t start = parts_[order[i]].start;
        line.append(text_, start, end_of(order[i]) - start);
      }
    }
    return line += "}\n";
  }

 private:
  struct Part {
    Py_ssize_t place;
    size_t start, value;
  };

  size_t end_of(size_t part) const {
    return part + 1 < count_ ? parts_[part + 1].start : text_.size();
  }

  const LineForm& form_;
  std::string text_;
  std::array<Part, LineForm::MOST> parts_;
  size_t count_ = 0;
  bool is_in_order_ = true;
};

}  // namespace tensorprobe
