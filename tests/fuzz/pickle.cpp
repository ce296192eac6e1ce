// Pickles, in which everything is allowed that is not code.
#include "tessera/checkpoint/formats/pickle/pickle.h"

#include "fuzz.h"
#include "tessera/checkpoint/formats/torch/pickle.h"

namespace tessera::fuzz {
namespace {

void read_pickle(std::span<const uint8_t> data) {
  expect_own_errors([&] {
    const auto value = checkpoint::pickle::read(std::as_bytes(data), checkpoint::torch_globals, "the input");
    if (const auto json = checkpoint::to_json(value)) json->dump();
    checkpoint::pickle::write(value);
  });
}

std::vector<std::string> seeds_of_pickle() {
  using std::string_literals::operator""s;
  namespace pickle = checkpoint::pickle;
  const pickle::Value text = "a text";
  const pickle::Object size{.name = "torch.Size", .arguments = {pickle::Tuple{.items = {int64_t{1}, int64_t{1} << 40}}}};
  const pickle::Dict dict{
      .entries = {{text, size}, {int64_t{-1}, pickle::List{.items = {text, true, {}, 0.5}}}, {"b", pickle::Bytes{"\1\xff"}}}};
  const pickle::Object made{
      .name = "torch.device", .arguments = {pickle::Storage{.id = text}}, .state = dict, .made = pickle::Object::Made::New};
  std::string doubles = "\x80\2)q\0"s, nested = "\x80\2";
  for (int i = 0; i < 60; i++) doubles += "h\0h\0\x86q\0"s;
  for (int i = 0; i < 150; i++) nested += "]";
  return {
      pickle::write(dict),
      pickle::write(made),
      "\x80\4\x95\x10\0\0\0\0\0\0\0}\x94(\x8c\1a\x94K\1\x8c\1b\x94]\x94(K\2h\1eu."s,
      "\x80\4\x8c\5torch\x94\x8c\4Size\x94\x93\x94)\x81}\x94\x8c\1x\x94Nsb."s,
      "\x80\2c_codecs\nencode\nX\2\0\0\0\xc3\xbfX\6\0\0\0latin1\x86R."s,
      "\x80\2ccollections\nOrderedDict\n)R(X\1\0\0\0aK\1u}b."s,
      "\x80\3]q\0(h\0ta."s,
      "\x80\2"
      "cos\nsystem\nX\2\0\0\0ls\x85R."s,
      "\x80\5\x8e\xff\xff\xff\xff\xff\xff\xff\x7f."s,
      "\x80\2\x8b\xff\xff\xff\xff."s,
      doubles + ".",
      nested + std::string(149, 'a') + ".",
      "",
  };
}

const Target target_pickle("pickle", read_pickle, seeds_of_pickle);

}  // namespace
}  // namespace tessera::fuzz
