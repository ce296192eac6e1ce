// Pickles of CPython, our own, and damaged or hostile ones.
#include "tessera/checkpoint/formats/pickle/pickle.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"

namespace tessera::testing::pickle_test {
namespace {

namespace pickle = checkpoint::pickle;
using pickle::Value;
using std::string_literals::operator""s;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// pickle.dumps({"t": (1, -1, 300, 70000, -2**40, 2**62), "f": 0.5, "l": [None, True, False, "grö"], "b": b"\x00\xff", "e": (),
//               "o": OrderedDict(a=1) with an attribute, 3: {}, "s": [s, s], "eb": b""}, protocol)
const std::string kOfPython[] = {
    // protocol 2
    "80027d7100285801000000747101284b014affffffff4d2c014a701101008a060000000000ff8a080000000000000040747102580100000066710347"
    "3fe000000000000058010000006c71045d7105284e888958040000006772c3b67106655801000000627107635f636f646563730a656e636f64650a71"
    "08580300000000c3bf710958060000006c6174696e31710a86710b52710c580100000065710d2958010000006f710e63636f6c6c656374696f6e730a"
    "4f726465726564446963740a710f2952711058010000006171114b01737d711258040000006d65746171134b0273624b037d71145801000000737115"
    "5d7116285801000000787117681765580200000065627118635f5f6275696c74696e5f5f0a62797465730a71192952711a752e",
    // protocol 3
    "80037d7100285801000000747101284b014affffffff4d2c014a701101008a060000000000ff8a080000000000000040747102580100000066710347"
    "3fe000000000000058010000006c71045d7105284e888958040000006772c3b67106655801000000627107430200ff71085801000000657109295801"
    "0000006f710a63636f6c6c656374696f6e730a4f726465726564446963740a710b2952710c580100000061710d4b01737d710e58040000006d657461"
    "710f4b0273624b037d711058010000007371115d711228580100000078711368136558020000006562711443007115752e",
    // protocol 4
    "800495ad000000000000007d94288c017494284b014affffffff4d2c014a701101008a060000000000ff8a08000000000000004074948c016694473f"
    "e00000000000008c016c945d94284e88898c046772c3b694658c016294430200ff948c016594298c016f948c0b636f6c6c656374696f6e73948c0b4f"
    "726465726564446963749493942952948c0161944b01737d948c046d657461944b0273624b037d948c0173945d94288c0178946815658c0265629443"
    "0094752e",
    // protocol 5
    "800595ad000000000000007d94288c017494284b014affffffff4d2c014a701101008a060000000000ff8a08000000000000004074948c016694473f"
    "e00000000000008c016c945d94284e88898c046772c3b694658c016294430200ff948c016594298c016f948c0b636f6c6c656374696f6e73948c0b4f"
    "726465726564446963749493942952948c0161944b01737d948c046d657461944b0273624b037d948c0173945d94288c0178946815658c0265629443"
    "0094752e"};

constexpr auto kAsText =
    "{'t': (1, -1, 300, 70000, -1099511627776, 4611686018427387904), 'f': 0.5, 'l': [None, true, false, 'grö'], "
    "'b': bytes(00 ff), 'e': (), 'o': {'a': 1}, 3: {}, 's': ['x', 'x'], 'eb': bytes()}";

std::string from_hex(const std::string& digits) {
  std::string result;
  for (size_t i = 0; i < digits.size(); i += 2) result += static_cast<char>(std::stoi(digits.substr(i, 2), nullptr, 16));
  return result;
}

std::optional<pickle::Meaning> known(const std::string& name) {
  if (name == "collections.OrderedDict") return pickle::Meaning::Dict;
  if (name == "_codecs.encode" || name == "builtins.bytes") return pickle::Meaning::Encoded;
  if (name == "torch.Size") return pickle::Meaning::Object;
  return std::nullopt;
}

Value read(const std::string& bytes) {
  return pickle::read(std::as_bytes(std::span(bytes)), known, "file.pt");
}

std::string as_text(const Value& value);

std::string as_text(const std::vector<Value>& values) {
  std::string result;
  for (const auto& value : values) result += (result.empty() ? "" : ", ") + as_text(value);
  return result;
}

std::string as_text(const Value& value) {
  if (value.is_none()) return "None";
  if (const auto* const flag = value.as<bool>()) return fmt::to_string(*flag);
  if (const auto* const integer = value.as<int64_t>()) return fmt::to_string(*integer);
  if (const auto* const number = value.as<double>()) return fmt::to_string(*number);
  if (const auto* const text = value.as<std::string>()) return "'" + *text + "'";
  if (const auto* const list = value.as<pickle::List>()) return "[" + as_text(list->items) + "]";
  if (const auto* const tuple = value.as<pickle::Tuple>()) return "(" + as_text(tuple->items) + ")";
  if (const auto* const global = value.as<pickle::Global>()) return global->name;
  if (const auto* const storage = value.as<pickle::Storage>()) return "storage " + as_text(storage->id);
  if (const auto* const object = value.as<pickle::Object>()) {
    const auto state = object->state.is_none() ? "" : " with " + as_text(object->state);
    return (object->made == pickle::Object::Made::New ? "new " : "") + object->name + "(" + as_text(object->arguments) + ")" + state;
  }
  std::string result;
  if (const auto* const bytes = value.as<pickle::Bytes>()) {
    for (const unsigned char byte : bytes->bytes) result += fmt::format("{}{:02x}", result.empty() ? "" : " ", byte);
    return "bytes(" + result + ")";
  }
  for (const auto& [key, item] : value.as<pickle::Dict>()->entries) {
    result += (result.empty() ? "" : ", ") + as_text(key) + ": " + as_text(item);
  }
  return "{" + result + "}";
}

/// An object with everything that objects have.
Value object_with_all() {
  return pickle::Object{.name = "torch.Size",
                        .arguments = {pickle::Global{"torch.Size"}, pickle::Storage{.id = pickle::Tuple{.items = {"storage"}}}},
                        .state = pickle::Dict{.entries = {{"torch.Size", 1.5}}},
                        .made = pickle::Object::Made::New};
}

TEST(Pickle, ReadsWhatPythonWrites) {
  for (const auto& digits : kOfPython) EXPECT_EQ(as_text(read(from_hex(digits))), kAsText);
}

TEST(Pickle, WritesWhatItReads) {
  for (const auto& digits : kOfPython) EXPECT_EQ(as_text(read(pickle::write(read(from_hex(digits))))), kAsText);
  const auto written = pickle::write(pickle::List{.items = {object_with_all(), object_with_all()}});
  const std::string once = "new torch.Size(torch.Size, storage ('storage')) with {'torch.Size': 1.5}";
  EXPECT_EQ(as_text(read(written)), "[" + once + ", " + once + "]");
  EXPECT_EQ(written.find("storage"), written.rfind("storage")) << "equal texts are written once";
  for (const int64_t number :
       {int64_t{0}, int64_t{255}, int64_t{256}, int64_t{-1}, int64_t{INT32_MIN}, INT32_MIN - int64_t{1}, INT64_MIN, INT64_MAX}) {
    EXPECT_EQ(as_text(read(pickle::write(number))), fmt::to_string(number));
  }
  std::vector<Value> many;
  for (int i = 0; i < 600; i++) many.insert(many.end(), 2, Value(fmt::format("{}", i / 2)));  // places in the memo above 255
  const Value list = pickle::List{.items = many};
  EXPECT_EQ(as_text(read(pickle::write(list))), as_text(list));
}

TEST(Pickle, RefusesCode) {
  EXPECT_THAT(
      [] {
        read(
            "\x80\x02"
            "cos\nsystem\nX\x02\0\0\0ls\x85R.");
      },
      ThrowsMessage<IoError>(AllOf(HasSubstr("file.pt refers to os.system"), HasSubstr("run code"))));
  EXPECT_THAT([] { read("\x80\x04\x8c\x02os\x8c\x06system\x93."); }, ThrowsMessage<IoError>(HasSubstr("os.system")));
}

std::string repeated(const std::string& part, int count) {
  std::string result;
  for (int i = 0; i < count; i++) result += part;
  return result;
}

TEST(Pickle, RefusesWhatIsNoPickle) {
  const auto refused = [](const std::string& program, const std::string& why) {
    EXPECT_THAT([&] { read("\x80\x02" + program); }, ThrowsMessage<IoError>(AllOf(HasSubstr("file.pt is damaged"), HasSubstr(why))));
  };
  EXPECT_THAT([] { read(""); }, ThrowsMessage<IoError>(HasSubstr("cut off")));
  EXPECT_THAT([] { read("garbage"); }, ThrowsMessage<IoError>(HasSubstr("does not begin as pickles")));
  EXPECT_THAT([] { read("\x80\x06N."); }, ThrowsMessage<IoError>(HasSubstr("protocol 6")));
  refused("NN.", "2 values");
  refused("(N.", "instead of one");
  refused(".", "0 values");
  refused("a.", "value is missing");
  refused("(Na.", "value is missing");
  refused("t.", "mark is missing");
  refused("NNa.", "appended to None");
  refused("]NNs.", "added to a list");
  refused("}(Nu.", "no value");
  refused("h\5.", "that it has not stored");
  refused("NNR.", "None is called with None");
  refused("ctorch\nSize\nN\x81.", "a class's name is called with None");
  refused("N}b.", "None is given a state");
  refused("ctorch\nSize\n)R}b}b.", "an object is given a state");
  refused("\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\0."s, "64 bits");
  refused("\x8c\x02\xed\xa0"s + ".", "UTF-8");
  refused("c" + std::string(300, 'a') + "\nb\n.", "too long");
  refused("X\xff\xff\xff\xff"s, "cut off");
  refused("cabc", "cut off");
  refused("\x95\xff\0\0\0\0\0\0\0N."s, "frame");
  refused("P1\n.", "0x50");
}

TEST(Pickle, RefusesWhatWouldNeverEnd) {
  const auto refused = [](const std::string& program, const std::string& why) {
    EXPECT_THAT([&] { read("\x80\x02" + program); }, ThrowsMessage<IoError>(HasSubstr(why)));
  };
  refused("]q\0h\0a."s, "contains itself");
  refused("]q\0(h\0ta."s, "contains itself");
  refused("}q\0]q\1h\0ah\1a."s, "contains itself");
  refused("]q\0\x85h\0Na."s, "after it was used");
  refused(repeated("]", 200) + repeated("a", 199) + ".", "nested");
  refused("N" + repeated("\x85", 200) + ".", "nested");
  refused(std::string("]q\0") + repeated("", 0), "cut off");
  // Each list contains the list before it twice.
  std::string doubles(")q\0", 3);
  for (int i = 0; i < 90; i++) doubles += "h\0h\0\x86q\0"s;
  refused(doubles + ".", "again and again");
  // A long text in many places.
  refused("X\0\0\1\0"s + std::string(65536, 'a') + "q\0]("s + repeated("h\0"s, 9000) + "e.", "again and again");
}

TEST(Pickle, DamageIsAnErrorThatNamesThePlace) {
  for (const auto& digits : kOfPython) {
    const auto whole = from_hex(digits);
    for (size_t length = 0; length < whole.size(); length++) {
      EXPECT_THAT([&] { read(whole.substr(0, length)); }, ThrowsMessage<IoError>(AllOf(HasSubstr("file.pt"), HasSubstr("byte "))));
    }
    for (size_t place = 0; place < whole.size(); place++) {
      for (int bit = 0; bit < 8; bit++) {
        auto damaged = whole;
        damaged[place] = static_cast<char>(damaged[place] ^ (1 << bit));
        try {
          as_text(read(damaged));
        } catch (const IoError&) {  // no other exception may come
        }
      }
    }
  }
}

TEST(Pickle, HasBytesAsLetters) {
  std::string all;
  for (int byte = 0; byte < 256; byte++) all += static_cast<char>(byte);
  EXPECT_EQ(pickle::from_latin1(pickle::to_latin1(all)), all);
  EXPECT_EQ(pickle::to_latin1("a\xff"), "aÿ");
  for (const auto* const text : {"€", "Ā", "\xc3"}) EXPECT_EQ(pickle::from_latin1(text), std::nullopt) << text;
  EXPECT_THAT([] { read("\x80\2c_codecs\nencode\nX\3\0\0\0€X\6\0\0\0latin1\x86R."s); }, ThrowsMessage<IoError>(HasSubstr("not as Python")));
}

TEST(Pickle, RefusesToWriteWhatIsNoUtf8) {
  EXPECT_THAT([] { pickle::write(Value(std::string("\xff"))); }, ThrowsMessage<UsageError>(HasSubstr("UTF-8")));
}

}  // namespace
}  // namespace tessera::testing::pickle_test
