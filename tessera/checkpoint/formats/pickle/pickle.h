// Reads Python's pickles without running their code: a pickle becomes a tree of plain values, in which calls and classes are only names.
// Writes such trees as pickles.
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
  /// Returns the value of this key in a dict; the item of a list or a tuple, or an object's argument, at this index. Returns None if the
  /// value does not exist.
  const Value& operator[](std::string_view key) const;
  const Value& operator[](size_t place) const;
  /// The items of a list or a tuple; nullptr for other values.
  const std::vector<Value>* items() const;
  /// The keys and values of a dict; empty for other values.
  const std::vector<std::pair<Value, Value>>& entries() const;
  /// Its kind in words, for errors: "a text".
  std::string_view kind() const;

 private:
  friend class Reader;
  Part part_;
};

/// The size and depth of each part, which the reader counts to bound the work of code that traverses the tree.
struct Extent {
  uint64_t weight = 1;  // of the tree below the part; a shared part counts each time it occurs
  uint32_t depth = 1;
  bool closed = false;  // set when the part is put into another value: a later change could make it contain itself
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
/// A dict, in the order of the pickle. A key may occur twice.
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
/// The object that a call of a class or a function would make in Python. The reader calls nothing.
struct Object {
  enum class Made { Called, New };  // by class(arguments), or by class.__new__(class, arguments)
  std::string name;
  std::vector<Value> arguments = {};
  Value state = {};
  Made made = Made::Called;
  Extent extent = {};
};
/// An object that a pickle does not contain: the pickle refers to it by an id that the writing program has chosen.
struct Storage {
  Value id;
  Extent extent = {};
};
/// A tensor to write, whose values come later. Copies of one Value are the same tensor in several places, such as a tied parameter.
struct Tensor {
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> shape = {};
};

/// The kind of value that a call of a global becomes.
enum class Meaning {
  Object,
  Dict,     // OrderedDict and its like: a dict without its attributes
  Encoded,  // _codecs.encode(text, "latin1") or bytes(): bytes
};
/// Returns what a global means, or nothing if pickles with this global are refused.
using Globals = std::function<std::optional<Meaning>(const std::string& name)>;

/// Reads protocols 2 to 5. Throws IoError, which begins with `where`, if the bytes are not a pickle, or if they have a global that
/// `globals` refuses.
Value read(std::span<const std::byte> bytes, const Globals& globals, const std::string& where);

/// Writes a tree without tensors in protocol 2. Equal texts and globals are written once. Throws UsageError for text that is not UTF-8.
std::string write(const Value& value);

/// Converts bytes to text and back. Protocol 2 has no type for bytes, so Python writes each byte as the character with its number.
/// from_latin1() returns nothing if a character has a number above 255.
std::string to_latin1(std::string_view bytes);
std::optional<std::string> from_latin1(std::string_view text);

}  // namespace tessera::checkpoint::pickle
