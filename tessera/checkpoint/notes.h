// Notes: named values that a program keeps in a checkpoint besides the model and the optimizer, such as its position in the data.
#pragma once

#include <charconv>
#include <concepts>
#include <map>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::checkpoint {

/// A number that survives conversion to text and back, to the bit.
template <class T>
concept Number = (std::integral<T> || std::floating_point<T>) && !std::same_as<T, bool> && !std::same_as<T, char>;

/// A class that converts to text and back, such as data::Position and optim::LearningRate.
template <class T>
concept Savable = requires(const T& value, const std::string& text) {
  { value.save() } -> std::convertible_to<std::string>;
  { T::load(text) } -> std::same_as<T>;
};

/// A value as text.
class Note {
 public:
  Note() = default;
  Note(std::string text) : text_(std::move(text)) {}
  Note(std::string_view text) : text_(text) {}
  Note(const char* text) : text_(text) {}
  template <std::same_as<bool> T>
  Note(T value) : text_(value ? "true" : "false") {}
  template <Number T>
  Note(T value) {
    char digits[64];
    text_.assign(digits, std::to_chars(digits, digits + sizeof digits, value).ptr);
  }
  template <Savable T>
  Note(const T& value) : text_(value.save()) {}

  const std::string& text() const& { return text_; }
  std::string text() && { return std::move(text_); }

  /// Returns the value that the note was made of. Throws UsageError, with the note's name, if the text is not a T.
  template <class T>
  T as() const {
    if constexpr (std::same_as<T, std::string>) {
      return text_;
    } else if constexpr (std::same_as<T, bool>) {
      if (text_ != "true" && text_ != "false") refuse("neither true nor false");
      return text_ == "true";
    } else if constexpr (Number<T>) {
      T value{};
      const auto* const end = text_.data() + text_.size();
      if (const auto read = std::from_chars(text_.data(), end, value); read.ec != std::errc() || read.ptr != end) {
        refuse(std::integral<T> ? "not an integer of the requested type" : "not a number of the requested type");
      }
      return value;
    } else {
      static_assert(Savable<T>, "a note holds text, bool, numbers, and classes with save() and static load(text)");
      try {
        return T::load(text_);
      } catch (const std::exception& error) {
        refuse(error.what());
      }
    }
  }

  bool operator==(const Note& other) const { return text_ == other.text_; }

 private:
  friend class Notes;
  [[noreturn]] void refuse(std::string_view why) const;

  std::string text_;
  std::string name_;  // for error messages; empty unless the note is from Notes
};

class Notes {
 public:
  Notes() = default;
  Notes(std::initializer_list<std::pair<const std::string, Note>> notes) : notes_(notes) {}

  Note& operator[](const std::string& name) {
    auto& note = notes_[name];
    note.name_ = name;
    return note;
  }
  /// Throws UsageError if there is no note of that name.
  Note at(const std::string& name) const;
  bool contains(const std::string& name) const { return notes_.contains(name); }
  auto begin() const { return notes_.begin(); }
  auto end() const { return notes_.end(); }

  bool operator==(const Notes&) const = default;

 private:
  std::map<std::string, Note> notes_;
};

}  // namespace tessera::checkpoint
