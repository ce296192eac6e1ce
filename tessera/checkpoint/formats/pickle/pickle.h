// Python's pickles, without running what they say: a pickle becomes a tree of plain values, in which calls and classes are only names. The
// same trees are written.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace tessera::checkpoint::pickle {

struct Bytes;
struct List;
struct Tuple;
struct Dict;
struct Global;
struct Object;
struct Storage;
struct Tensor;

/// A value in a pickle. Copies share texts, lists and so on. No value contains itself, and no tree is too deep for recursion.
class Value {
  using Part = std::variant<std::monostate, bool, int64_t, double, std::shared_ptr<std::string>, std::shared_ptr<Bytes>,
                            std::shared_ptr<List>, std::shared_ptr<Tuple>, std::shared_ptr<Dict>, std::shared_ptr<Global>,
                            std::shared_ptr<Object>, std::shared_ptr<Storage>, std::shared_ptr<Tensor>>;

 public:
  Value() = default;  // None
  Value(bool value) : part_(value) {}
  Value(int64_t value) : part_(value) {}
  Value(double value) : part_(value) {}
  Value(const char* text) : Value(std::string(text)) {}
  template <class T>
  requires std::is_constructible_v<Part, std::shared_ptr<T>> Value(T part) : part_(std::make_shared<T>(std::move(part))) {}

  bool is_none() const { return std::holds_alternative<std::monostate>(part_); }
  /// The value if it is a T: bool, int64_t, double, std::string or one of the structs below. Otherwise nullptr.
  template <class T>
  const T* as() const {
    if constexpr (std::is_arithmetic_v<T>) {
      return std::get_if<T>(&part_);
    } else {
      const auto* const found = std::get_if<std::shared_ptr<T>>(&part_);
      return found == nullptr ? nullptr : found->get();
    }
  }
  /// The value of this key in a dict; the item at this place of a list or a tuple, or an object's argument. None if there is none.
  const Value& operator[](std::string_view key) const;
  const Value& operator[](size_t place) const;
  /// The items of a list or a tuple; nullptr for other values.
  const std::vector<Value>* items() const;
  /// The keys and values of a dict; none of other values.
  const std::vector<std::pair<Value, Value>>& entries() const;
  /// Its kind in words, for errors: "a text".
  std::string_view kind() const;

 private:
  friend class Reader;
  Part part_;
};

/// What the reader counts of each part, to bound the work of those who walk through the tree.
struct Extent {
  uint64_t weight = 1;  // of its tree, in which shared parts count each time
  uint32_t depth = 1;
  bool closed = false;  // set when it becomes a part of something: a later change could make it contain itself
};

struct Bytes {
  std::string bytes;
};
struct List {
  std::vector<Value> items = {};
  Extent extent = {};
};
struct Tuple {
  std::vector<Value> items = {};
  Extent extent = {};
};
/// In the order of the pickle; a key may come twice.
struct Dict {
  std::vector<std::pair<Value, Value>> entries = {};
  Extent extent = {};

  /// The value of a key that is this text, or nullptr.
  const Value* find(std::string_view key) const;
};
/// A class or a function: "torch.Size".
struct Global {
  std::string name;
};
/// What a call of a class or a function would make: nothing is called.
struct Object {
  enum class Made { Called, New };  // by class(arguments), or by class.__new__(class, arguments)
  std::string name;
  std::vector<Value> arguments = {};
  Value state = {};
  Made made = Made::Called;
  Extent extent = {};
};
/// An object that a pickle refers to but does not contain, by an id of the writing program's choice.
struct Storage {
  Value id;
  Extent extent = {};
};
/// A tensor that is to be written, whose values follow. Copies of a value are one tensor in several places, as tied parameters are.
struct Tensor {
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> shape = {};
};

/// What a call of a global becomes.
enum class Meaning {
  Object,
  Dict,     // OrderedDict and its like: a dict, whatever the attributes
  Encoded,  // _codecs.encode(text, "latin1") or bytes(): bytes
};
/// Says what a global means, or nothing if pickles with it are refused.
using Globals = std::function<std::optional<Meaning>(const std::string& name)>;

/// Reads protocols 2 to 5. Throws IoError, which begins with `where`, if the bytes are not a pickle, or name other globals.
Value read(std::span<const std::byte> bytes, const Globals& globals, const std::string& where);

/// Writes protocol 2, without tensors. Equal texts and globals are written once. Throws UsageError for text that is not UTF-8.
std::string write(const Value& value);

/// Protocol 2 has no bytes: Python writes each byte as the letter with its number. from_latin1() fails if a letter is not such a byte.
std::string to_latin1(std::string_view bytes);
std::optional<std::string> from_latin1(std::string_view text);

}  // namespace tessera::checkpoint::pickle
