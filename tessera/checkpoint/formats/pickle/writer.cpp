// Writes a tree of plain values as a pickle.
#include <bit>
#include <unordered_map>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/checkpoint/formats/pickle/pickle.h"

namespace tessera::checkpoint::pickle {
namespace {

class Writer {
 public:
  std::string text{"\x80\x02", 2};

  void write(const Value& value) {
    if (value.is_none()) {
      text += 'N';
    } else if (const auto* const flag = value.as<bool>()) {
      text += *flag ? '\x88' : '\x89';
    } else if (const auto* const integer = value.as<int64_t>()) {
      write_integer(*integer);
    } else if (const auto* const number = value.as<double>()) {
      auto bits = std::bit_cast<uint64_t>(*number);
      text += 'G';
      for (int shift = 56; shift >= 0; shift -= 8) text += static_cast<char>(bits >> shift);
    } else if (const auto* const words = value.as<std::string>()) {
      write_text(*words);
    } else if (const auto* const bytes = value.as<Bytes>()) {
      write_bytes(bytes->bytes);
    } else if (const auto* const list = value.as<List>()) {
      text += ']';
      write_marked(list->items, 'e');
    } else if (const auto* const tuple = value.as<Tuple>()) {
      write_tuple(tuple->items);
    } else if (const auto* const dict = value.as<Dict>()) {
      write_dict(*dict);
    } else if (const auto* const global = value.as<Global>()) {
      write_global(global->name);
    } else if (const auto* const storage = value.as<Storage>()) {
      write(storage->id);
      text += 'Q';
    } else {
      write_object(*value.as<Object>());
    }
  }

 private:
  void write_number(uint64_t number, int bytes) {
    for (int i = 0; i < bytes; i++) text += static_cast<char>(number >> (8 * i));
  }

  void write_integer(int64_t value) {
    if (value >= 0 && value < 0x100) {
      text += 'K';
      write_number(static_cast<uint64_t>(value), 1);
    } else if (value >= INT32_MIN && value <= INT32_MAX) {
      text += 'J';
      write_number(static_cast<uint64_t>(value), 4);
    } else {
      text += "\x8a\x08";  // LONG1 of eight bytes
      write_number(static_cast<uint64_t>(value), 8);
    }
  }

  void write_length(size_t length) {
    if (length > INT32_MAX) throw UsageError("a text of 2 GB or more does not fit into a pickle");
    write_number(length, 4);
  }

  void write_text(const std::string& words) {
    if (recall('X' + words)) return;
    if (!is_utf8(words)) throw UsageError("a text that is not UTF-8 can't be saved for Python");
    text += 'X';
    write_length(words.size());
    text += words;
    remember('X' + words);
  }

  void write_bytes(const std::string& bytes) { write(Object{.name = "_codecs.encode", .arguments = {to_latin1(bytes), "latin1"}}); }

  void write_marked(const std::vector<Value>& items, char end) {
    if (items.empty()) return;
    text += '(';
    for (const auto& item : items) write(item);
    text += end;
  }

  void write_tuple(const std::vector<Value>& items) {
    if (items.empty()) {
      text += ')';
    } else if (items.size() <= 3) {
      for (const auto& item : items) write(item);
      text += "\x85\x86\x87"[items.size() - 1];
    } else {
      write_marked(items, 't');
    }
  }

  void write_dict(const Dict& dict) {
    text += '}';
    if (dict.entries.empty()) return;
    text += '(';
    for (const auto& [key, value] : dict.entries) {
      write(key);
      write(value);
    }
    text += 'u';
  }

  void write_global(const std::string& name) {
    if (recall('c' + name)) return;
    const auto dot = name.rfind('.');
    text += "c" + name.substr(0, dot) + "\n" + name.substr(dot + 1) + "\n";
    remember('c' + name);
  }

  void write_object(const Object& object) {
    write_global(object.name);
    write_tuple(object.arguments);
    text += object.made == Object::Made::Called ? 'R' : '\x81';
    if (object.state.is_none()) return;
    write(object.state);
    text += 'b';
  }

  bool recall(const std::string& key) {
    const auto found = memo_.find(key);
    if (found == memo_.end()) return false;
    write_place('h', 'j', found->second);
    return true;
  }
  void remember(const std::string& key) {
    write_place('q', 'r', memo_.size());
    memo_.emplace(key, memo_.size());
  }
  void write_place(char small, char large, size_t place) {
    text += place < 0x100 ? small : large;
    write_number(place, place < 0x100 ? 1 : 4);
  }

  std::unordered_map<std::string, size_t> memo_;
};

}  // namespace

std::string write(const Value& value) {
  Writer writer;
  writer.write(value);
  return std::move(writer.text) + ".";
}

}  // namespace tessera::checkpoint::pickle
