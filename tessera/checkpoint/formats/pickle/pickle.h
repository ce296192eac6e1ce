// Python's pickles, without running what they say: a pickle becomes a tree of plain values, in which calls and classes are only names.
#pragma once

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

/// Copies share texts, lists and so on. Nothing contains itself, and no tree is so deep that recursion would be a problem.
class Value {
 public:
  Value() = default;  // None
  Value(bool value) : value_(value) {}
  Value(int64_t value) : value_(value) {}
  Value(double value) : value_(value) {}
  Value(std::string text);
  Value(const char* text) : Value(std::string(text)) {}
  Value(Bytes bytes);
  Value(List list);
  Value(Tuple tuple);
  Value(Dict dict);
  Value(Global global);
  Value(Object object);
  Value(Storage storage);

  bool is_none() const { return std::holds_alternative<std::monostate>(value_); }
  /// The value if it is a T: bool, int64_t, double, std::string or one of the structs below. Otherwise nullptr.
  template <class T>
  const T* as() const {
    if constexpr (std::is_arithmetic_v<T>) {
      return std::get_if<T>(&value_);
    } else {
      const auto* const found = std::get_if<std::shared_ptr<T>>(&value_);
      return found == nullptr ? nullptr : found->get();
    }
  }
  /// What it is, for errors: "a text".
  std::string_view kind() const;

 private:
  friend class Reader;
  std::variant<std::monostate, bool, int64_t, double, std::shared_ptr<std::string>, std::shared_ptr<Bytes>, std::shared_ptr<List>,
               std::shared_ptr<Tuple>, std::shared_ptr<Dict>, std::shared_ptr<Global>, std::shared_ptr<Object>, std::shared_ptr<Storage>>
      value_;
};

/// What the reader has to know of a part, to bound what others meet when they walk through it.
struct Extent {
  uint64_t weight = 1;  // of the tree that it is, where what is shared counts each time
  uint32_t depth = 1;
  bool closed = false;  // as soon as it is in something else: what changed after that could be made to contain itself
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

  /// The value of a text, or nullptr.
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
/// What a pickle refers to and does not contain, by an identity that the program that wrote it has chosen.
struct Storage {
  Value id;
  Extent extent = {};
};

/// What a call of a global becomes.
enum class Meaning {
  Object,
  Dict,     // OrderedDict and its like: a dict, whatever the attributes
  Encoded,  // _codecs.encode(text, "latin1") or bytes(): bytes
};
/// Says what a global means, or nothing if pickles with it are refused.
using Globals = std::function<std::optional<Meaning>(const std::string& name)>;

/// Reads protocols 2 to 5. Throws IoError, which begins with `where`, if the bytes are no pickle or one that asks for other globals.
Value read(std::span<const std::byte> bytes, const Globals& globals, const std::string& where);

/// Protocol 2. Equal texts and globals are written once. Throws UsageError for text that is no UTF-8.
std::string write(const Value& value);

/// Protocol 2 has no bytes: Python writes the text whose letters have these numbers. The way back fails if a letter is none of them.
std::string to_latin1(std::string_view bytes);
std::optional<std::string> from_latin1(std::string_view text);

}  // namespace tessera::checkpoint::pickle
