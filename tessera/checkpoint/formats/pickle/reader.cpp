// Reads a pickle into a tree of plain values, without running what it says.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <unordered_map>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/checkpoint/formats/pickle/input.h"
#include "tessera/checkpoint/formats/pickle/pickle.h"

namespace tessera::checkpoint::pickle {
namespace {

constexpr uint32_t kDeepest = 100;
constexpr size_t kLongestName = 256;     // letters in the name of a global
constexpr uint64_t kLettersApiece = 16;  // this many letters of a text weigh as much as a number

/// A tree may weigh kHeaviest for each byte of its pickle, plus kAlways. Without this bound, a few bytes could refer to the same part so
/// often that traversing the tree would never end.
constexpr uint64_t kHeaviest = 4, kAlways = 1000;

}  // namespace

/// Runs a pickle, which is a program for a machine with a stack of values and a memo of values that are used again.
class Reader {
 public:
  Reader(std::span<const std::byte> bytes, const Globals& globals, const std::string& where)
      : input_({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, where), globals_(globals) {}

  Value read() {
    if (input_.instruction() != '\x80') fail("it does not begin as pickles of protocol 2 to 5 do");
    const auto protocol = input_.number(1);
    if (protocol < 2 || protocol > 5) fail("it has protocol {}; only 2 to 5 are known", protocol);
    for (;;) {
      const auto code = input_.instruction();
      if (code == '.') break;
      step(code);
    }
    if (stack_.size() != 1 || !marks_.empty()) fail("it ends with {} values instead of one", stack_.size());
    return pop();
  }

 private:
  template <class... Values>
  [[noreturn]] void fail(FormatString<std::type_identity_t<Values>...> why, const Values&... values) const {
    input_.fail(why, values...);
  }

  void step(char code) {
    switch (code) {
      case '\x95':  // FRAME
        if (input_.number(8) > input_.left()) fail("a frame is longer than the pickle");
        return;
      case '(':
        return marks_.push_back(stack_.size());
      case 'N':
        return push({});
      case '\x88':
      case '\x89':
        return push(code == '\x88');
      case 'J':
        return push(int64_t{static_cast<int32_t>(input_.number(4))});
      case 'K':
      case 'M':
        return push(static_cast<int64_t>(input_.number(code == 'K' ? 1 : 2)));
      case '\x8a':
      case '\x8b':
        return push_long(input_.number(code == '\x8a' ? 1 : 4));
      case 'G':
        return push_double();
      case 'U':
      case '\x8c':
        return push_text(input_.number(1));
      case 'X':
        return push_text(input_.number(4));
      case '\x8d':
        return push_text(input_.number(8));
      case 'C':
      case 'B':
      case '\x8e':
        return push(Bytes{std::string(input_.text(input_.number(code == 'C' ? 1 : code == 'B' ? 4 : 8)))});
      case '}':
        return push(Dict{});
      case ']':
        return push(List{});
      case ')':
        return push(Tuple{});
      case 't':
        return push_tuple(pop_marked());
      case '\x85':
      case '\x86':
      case '\x87':
        return push_tuple(pop_many(static_cast<size_t>(code - '\x84')));
      case 'a':
        return append(pop_many(1));
      case 'e':
        return append(pop_marked());
      case 's':
        return set_items(pop_many(2));
      case 'u':
        return set_items(pop_marked());
      case 'c': {
        const auto module = input_.line();
        return push_global(module, input_.line());
      }
      case '\x93': {
        const auto names = pop_many(2);
        const auto *const module = names[0].as<std::string>(), *const name = names[1].as<std::string>();
        if (module == nullptr || name == nullptr) fail("the name of a class is not a text");
        return push_global(*module, *name);
      }
      case 'R':
      case '\x81':
        return make(code == 'R' ? Object::Made::Called : Object::Made::New);
      case 'b':
        return build();
      case 'Q':
        return push_storage();
      case 'h':
      case 'j':
        return recall(input_.number(code == 'h' ? 1 : 4));
      case 'q':
      case 'r':
        return remember(input_.number(code == 'q' ? 1 : 4));
      case '\x94':
        return remember(memo_.size());
      default:
        fail("the instruction 0x{:02x} is not one that checkpoints need", static_cast<unsigned char>(code));
    }
  }

  void push_long(uint64_t bytes) {
    if (bytes > sizeof(int64_t)) fail("an integer does not fit into 64 bits");
    auto number = input_.number(bytes);
    if (bytes > 0 && bytes < sizeof number && (number >> (8 * bytes - 1)) != 0) number |= ~uint64_t{0} << (8 * bytes);  // negative
    push(static_cast<int64_t>(number));
  }
  void push_double() {
    uint64_t bits = 0;
    for (const auto byte : input_.text(sizeof bits)) bits = bits << 8 | static_cast<unsigned char>(byte);
    push(std::bit_cast<double>(bits));
  }
  void push_text(uint64_t length) {
    const auto text = input_.text(length);
    if (!is_utf8(text)) fail("a text is not UTF-8");
    push(std::string(text));
  }

  void push(Value value) { stack_.push_back(std::move(value)); }
  size_t above_mark() const { return stack_.size() - (marks_.empty() ? 0 : marks_.back()); }
  std::vector<Value> pop_many(size_t count) {
    if (above_mark() < count) fail("a value is missing");
    const auto first = stack_.end() - static_cast<std::ptrdiff_t>(count);
    std::vector<Value> result(std::make_move_iterator(first), std::make_move_iterator(stack_.end()));
    stack_.erase(first, stack_.end());
    return result;
  }
  std::vector<Value> pop_marked() {
    if (marks_.empty()) fail("a mark is missing");
    auto result = pop_many(above_mark());
    marks_.pop_back();
    return result;
  }
  Value pop() { return std::move(pop_many(1).front()); }

  /// Returns the T on top of the stack, for adding a value to it; null if the top is of another kind.
  template <class T>
  T* top() {
    if (above_mark() == 0) fail("a value is missing");
    auto* const found = std::get_if<std::shared_ptr<T>>(&stack_.back().part_);
    if (found == nullptr) return nullptr;
    if ((*found)->extent.closed) fail("a value contains itself, or is changed after it was used");
    return found->get();
  }

  /// Adds the extent of `value` to the extent of the part that will contain it.
  void adopt(Extent& parent, const Value& value) {
    Extent own{.weight = 1, .depth = 0};
    std::visit(
        [&](const auto& part) {
          if constexpr (requires { part->extent; }) {
            part->extent.closed = true;
            own = part->extent;
          } else if constexpr (requires { part->size(); }) {
            own.weight += part->size() / kLettersApiece;
          } else if constexpr (requires { part->bytes; }) {
            own.weight += part->bytes.size() / kLettersApiece;
          }
        },
        value.part_);
    if (parent.closed) fail("a value contains itself");
    parent.weight += own.weight;
    parent.depth = std::max(parent.depth, own.depth + 1);
    if (parent.depth > kDeepest) fail("it is nested more than {} times", kDeepest);
    if (parent.weight > kHeaviest * input_.size() + kAlways) fail("it refers to the same parts again and again");
  }

  /// Counts and drops the items of an object whose class is derived from list or dict, since objects have no items here. Returns false if
  /// the top of the stack is not an object.
  bool add_to_object(const std::vector<Value>& items) {
    auto* const object = top<Object>();
    if (object == nullptr) return false;
    for (const auto& item : items) adopt(object->extent, item);
    return true;
  }

  void append(std::vector<Value> items) {
    auto* const list = top<List>();
    if (list == nullptr && add_to_object(items)) return;
    if (list == nullptr) fail("an item is appended to {} instead of a list", stack_.back().kind());
    for (auto& item : items) {
      adopt(list->extent, item);
      list->items.push_back(std::move(item));
    }
  }

  void set_items(std::vector<Value> items) {
    auto* const dict = top<Dict>();
    if (dict == nullptr && add_to_object(items)) return;
    if (dict == nullptr) fail("an entry is added to {} instead of a dict", stack_.back().kind());
    if (items.size() % 2 != 0) fail("a key has no value");
    for (size_t i = 0; i < items.size(); i += 2) {
      adopt(dict->extent, items[i]);
      adopt(dict->extent, items[i + 1]);
      dict->entries.emplace_back(std::move(items[i]), std::move(items[i + 1]));
    }
  }

  void push_tuple(std::vector<Value> items) {
    Tuple tuple{.items = std::move(items)};
    for (const auto& item : tuple.items) adopt(tuple.extent, item);
    push(std::move(tuple));
  }

  void push_global(std::string_view module, std::string_view name) {
    if (module.size() + name.size() > kLongestName) fail("the name of a class is too long");
    if (module == "__builtin__") module = "builtins";  // its name in Python 2, which protocol 2 keeps
    auto full = fmt::format("{}.{}", module, name);
    if (!is_utf8(full)) fail("the name of a class is not UTF-8");
    if (!globals_(full)) {
      throw IoError(
          "{} refers to {}, for which Python would run code of the file's choice, so it is refused; if you trust the "
          "file, load it in Python and save it again with tensors and plain values only",
          input_.where(), full);
    }
    push(Global{.name = std::move(full)});
  }

  void make(Object::Made made) {
    const auto arguments = pop();
    const auto callee = pop();
    const auto* const global = callee.as<Global>();
    const auto* const tuple = arguments.as<Tuple>();
    if (global == nullptr || tuple == nullptr) fail("{} is called with {}", callee.kind(), arguments.kind());
    switch (globals_(global->name).value()) {
      case Meaning::Dict:
        if (!tuple->items.empty()) fail("{} has arguments", global->name);
        return push(Dict{});
      case Meaning::Encoded:
        return push_encoded(*tuple);
      case Meaning::Object: {
        Object object{.name = global->name, .arguments = tuple->items, .made = made};
        for (const auto& argument : object.arguments) adopt(object.extent, argument);
        return push(std::move(object));
      }
    }
  }

  void push_encoded(const Tuple& arguments) {
    if (arguments.items.empty()) return push(Bytes{});
    const auto* const letters = arguments.items[0].as<std::string>();
    const auto* const code = arguments.items.size() == 2 ? arguments.items[1].as<std::string>() : nullptr;
    auto bytes = letters == nullptr || code == nullptr || *code != "latin1" ? std::nullopt : from_latin1(*letters);
    if (!bytes) fail("bytes are not as Python writes them");
    push(Bytes{std::move(*bytes)});
  }

  void build() {
    const auto state = pop();
    if (top<Dict>() != nullptr) return;  // drops attributes of an OrderedDict, such as the versions of modules
    auto* const object = top<Object>();
    if (object == nullptr || !object->state.is_none()) fail("{} is given a state", stack_.back().kind());
    adopt(object->extent, state);
    object->state = state;
  }

  void push_storage() {
    Storage storage{.id = pop()};
    adopt(storage.extent, storage.id);
    push(std::move(storage));
  }

  void recall(uint64_t place) {
    const auto found = memo_.find(place);
    if (found == memo_.end()) fail("it refers to a value that it has not stored");
    push(found->second);
  }
  void remember(uint64_t place) {
    if (above_mark() == 0) fail("a value is missing");
    memo_[place] = stack_.back();
  }

  Input input_;
  const Globals& globals_;
  std::vector<Value> stack_;
  std::vector<size_t> marks_;
  std::unordered_map<uint64_t, Value> memo_;
};

Value read(std::span<const std::byte> bytes, const Globals& globals, const std::string& where) {
  return Reader(bytes, globals, where).read();
}

}  // namespace tessera::checkpoint::pickle
