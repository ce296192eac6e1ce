#include "tessera/checkpoint/inspect.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tessera/base/folder.h"
#include "tessera/base/table.h"
#include "tessera/base/words.h"
#include "tessera/checkpoint/formats/gguf/gguf.h"
#include "tessera/checkpoint/stored/catalogs.h"
#include "tessera/checkpoint/stored/rank_file.h"
#include "tessera/checkpoint/stored/runs.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr size_t kLongestValue = 60;
/// The kinds of tensors: their keys in the JSON, and their names in the table.
constexpr std::pair<const char*, const char*> kKinds[] = {
    {"parameters", "parameters"}, {"buffers", "buffers"}, {"optimizer", "the optimizer"}, {"beside", "others"}};

std::string shown(const Json& value) {
  auto text = value.is_string() ? value.get<std::string>() : value.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (text.size() > kLongestValue) text = text.substr(0, kLongestValue) + "...";
  return printable(text);
}

std::string dtype_of(const StoredTensor& tensor) {
  return c10::toString(tensor.dtype);
}

std::string kind_of(const std::string& name, const Manifest& run) {
  if (run.catalog.buffers.contains(name)) return "buffers";
  if (is_optimizer_state(name, run)) return "optimizer";
  return is_of_model(name, run) ? "parameters" : "beside";
}

}  // namespace

std::string inspect(const fs::path& path) {
  const auto format = format_of(path);
  const CatalogReader stored(read_catalog(path));  // looks at the sizes of the files
  stored.verify_headers();
  const auto& catalog = stored.catalog();
  const auto* const holds = format == Format::Gguf && GgufFile(path).is_adapter() ? " with an adapter" : "";
  Json result = {{"path", path.string()}, {"format", fmt::format("{}{}", name_of(format), holds)}};
  const auto run = read_run(path);
  if (format == Format::Tessera) result["ranks"] = run.ranks;
  result["optimizer"] = run.optimizer;
  if (format == Format::Tessera) {
    result["notes"] = run.notes.front();
    result["origin"] = run.origin;
    if (!run.base.name.empty()) result["base"] = nlohmann::json(run.base);
    if (!run.adapters.empty()) result["adapters"] = run.adapters;
  }
  if (format == Format::TorchXla) result["ranks"] = catalog.files.size();
  int64_t numel = 0, bytes = 0;
  std::map<std::string, int64_t> kinds;  // the number of values of each kind, which only Tessera's format tells
  auto& tensors = (result["tensors"] = Json::object()).get_ref<Json::object_t&>();
  for (const auto& [name, tensor] : catalog.tensors) {
    const auto values = c10::multiply_integers(tensor.shape);
    const auto size = values * static_cast<int64_t>(c10::elementSize(tensor.dtype));
    // For each name, operator[] would search all earlier names.
    tensors.emplace_back(name, Json{{"dtype", dtype_of(tensor)}, {"shape", tensor.shape}, {"bytes", size}, {"parts", tensor.boxes.size()}});
    numel += values;
    bytes += size;
    if (format == Format::Tessera) kinds[kind_of(name, run)] += values;
  }
  result["aliases"] = catalog.aliases;
  result["values"] = catalog.values;
  result["left_out"] = run.catalog.left_out;
  result["files"] = Json::object();
  for (const auto& file : catalog.files) result["files"][file.filename().string()] = size_of_file(file).value_or(0);
  result["total"] = {{"tensors", catalog.tensors.size()}, {"numel", numel}, {"bytes", bytes}, {"checksums", catalog.checksums.size()}};
  if (!kinds.empty()) result["total"]["kinds"] = kinds;
  return result.dump(2, ' ', false, Json::error_handler_t::replace);
}

std::string to_table(const std::string& inspected) {
  const auto found = Json::parse(inspected);
  auto text = fmt::format("{}: {}", found["path"].get<std::string>(), found["format"].get<std::string>());
  if (found.contains("ranks")) text += " of " + counted(found["ranks"].get<int64_t>(), "rank");
  text += '\n';
  if (found.contains("optimizer") && found["optimizer"] != "")
    text += fmt::format("optimizer: {}\n", printable(found["optimizer"].get<std::string>()));
  if (found.contains("origin") && !found["origin"].empty()) {
    std::vector<std::string> words;
    for (const auto& [name, value] : found["origin"].items()) words.push_back(fmt::format("{} {}", name, value.get<std::string>()));
    text += fmt::format("origin: {}\n", printable(fmt::format("{}", fmt::join(words, ", "))));
  }
  if (found.contains("base")) {
    const auto base = nlohmann::json(found["base"]).get<BaseRecord>();
    text += printable(fmt::format("base: {} (checksum {}{}), which has {} that are not here", base.name, base.checksum,
                                  base.forms.empty() ? "" : ", held as " + base.forms, counted(base.parameters.size(), "parameter"))) +
            '\n';
  }
  if (found.contains("adapters")) text += printable("adapters: " + found["adapters"].get<std::string>()) + '\n';
  for (const auto* key : {"notes", "values"}) {
    if (!found.contains(key)) continue;
    for (const auto& [name, value] : found[key].items()) text += fmt::format("{}: {}\n", printable(name), shown(value));
  }
  std::vector<std::array<std::string, 5>> rows{{"tensor", "dtype", "shape", "bytes", "parts"}};
  for (const auto& [name, tensor] : found["tensors"].items()) {
    rows.push_back({printable(name), tensor["dtype"].get<std::string>(),
                    fmt::format("[{}]", fmt::join(tensor["shape"].get<std::vector<int64_t>>(), ", ")), tensor["bytes"].dump(),
                    tensor["parts"].dump()});
  }
  text += table_of(rows, "<<<>>");
  for (const auto& [alias, name] : found["aliases"].items())
    text += printable(fmt::format("{} is tied to {}", alias, name.get<std::string>())) + '\n';
  for (const auto& [name, why] : found["left_out"].items())
    text += printable(fmt::format("{} is left out: {}", name, why.get<std::string>())) + '\n';
  const auto& total = found["total"];
  text += fmt::format("{}, {}, {} in {}\n", counted(total["tensors"], "tensor"), counted(total["numel"], "value"),
                      counted(total["bytes"], "byte"), counted(std::ssize(found["files"]), "file"));
  if (total.contains("kinds")) {
    std::vector<std::string> words;
    for (const auto& [kind, where] : kKinds) {
      if (total["kinds"].contains(kind)) words.push_back(fmt::format("{} in {}", total["kinds"][kind].get<int64_t>(), where));
    }
    text += fmt::format("of the values, {}\n", fmt::join(words, ", "));
  }
  return text;
}

}  // namespace tessera::checkpoint
