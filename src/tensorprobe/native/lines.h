// A line of the log as text: its fields, and their order, are those of a struct in store/lines.py.
#pragma once

#include <array>
#include <charconv>
#include <string>

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
    size_t count = 0;
    for (const char* name : names) {
      const Ref text = must(PyUnicode_FromString(name));
      const Py_ssize_t place = PySequence_Index(fields.get(), text.get());
      if (place < 0) throw python_error();
      TORCH_CHECK(place < static_cast<Py_ssize_t>(MOST), "too many fields");
      places[count] = place;
      keys[count++] = ",\"" + std::string(name) + "\":";
    }
  }

  std::string opening;
  std::array<size_t, MOST> places{};
  std::array<std::string, MOST> keys;

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
  LineText(const LineForm& form, size_t expected) : form_(form) {
    text_.reserve(expected);
    text_ += form.opening;
  }

  // Begins a field: its value is to be added to the text.
  std::string& field(size_t which) {
    close();
    Part* const part = &parts_[form_.places[which]];
    is_in_order_ &= part > before_;
    before_ = last_ = part;
    part->start = text_.size();
    return text_ += form_.keys[which];
  }

  // The value of a field; `null` of one that was not begun.
  std::string value(size_t which) {
    close();
    const Part& part = parts_[form_.places[which]];
    const size_t start = part.start + form_.keys[which].size();
    return part.end ? text_.substr(start, part.end - start) : "null";
  }

  // With its newline; nothing may be added any more.
  const std::string& finish() {
    close();
    if (is_in_order_) return text_ += "}\n";
    sorted_.reserve(text_.size() + 2);
    sorted_ += form_.opening;
    for (const Part& part : parts_) {
      if (part.end) sorted_.append(text_, part.start, part.end - part.start);
    }
    return sorted_ += "}\n";
  }

 private:
  struct Part {
    size_t start = 0, end = 0;
  };

  void close() {
    if (last_ != nullptr) last_->end = text_.size();
    last_ = nullptr;
  }

  const LineForm& form_;
  std::string text_, sorted_;
  std::array<Part, LineForm::MOST> parts_;  // in the order of the struct
  Part* last_ = nullptr;  // the one that is being written
  Part* before_ = nullptr;
  bool is_in_order_ = true;
};

}  // namespace tensorprobe
