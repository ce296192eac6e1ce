#include "tessera/cli/ckpt/places.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <memory>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/words.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/formats/hub.h"
#include "tessera/checkpoint/formats/torch_xla/torch_xla.h"
#include "tessera/checkpoint/step_folders.h"
#include "tessera/train/progress.h"

namespace tessera::cli {

namespace fs = std::filesystem;

constexpr size_t kMostNames = 5;

std::string what_is_there(const fs::path& prefix) {
  const auto folder = prefix.has_parent_path() ? prefix.parent_path() : fs::path(".");
  const auto all = names_in(folder);
  if (!all) return fmt::format("there is no folder {}", folder.string());
  std::vector<std::string> names;
  std::ranges::copy_if(*all, std::back_inserter(names), [&](const std::string& name) {
    std::error_code unknown;
    if (fs::is_symlink(folder / name, unknown)) return false;  // a link such as PREFIX-latest
    return name.find("-step-") != std::string::npos || checkpoint::is_complete(folder / name);
  });
  if (names.empty()) return fmt::format("the folder {} holds no checkpoint", folder.string());
  const auto given = prefix.filename().string();
  auto known = checkpoint::prefixes_in(folder);
  std::ranges::copy(names, std::back_inserter(known));
  const auto nearest = std::ranges::find(known, given) == known.end() ? nearest_name(given, known) : std::string();
  const auto meant = nearest.empty() ? std::string() : fmt::format("did you mean {}? ", (prefix.parent_path() / nearest).string());
  const auto distance = [&](const std::string& name) {
    const auto of_run = checkpoint::prefix_of(name).value_or(name).string();
    return std::min(edit_distance(given, name), edit_distance(given, of_run));
  };
  std::ranges::stable_sort(names, {}, distance);
  const auto more = names.size() > kMostNames ? fmt::format(" and {} more", names.size() - kMostNames) : "";
  names.resize(std::min(names.size(), kMostNames));
  return fmt::format("{}{} has {}{}", meant, folder.string(), fmt::join(names, ", "), more);
}

fs::path find_checkpoint(const fs::path& prefix) {
  if (checkpoint::is_complete(prefix)) return prefix;
  if (const auto newest = checkpoint::latest(prefix)) return *newest;
  throw ConfigError("{}: no complete checkpoint of that name, and none called {}-step-N; {}", prefix, prefix.filename(),
                    what_is_there(prefix));
}

std::string without_slashes(std::string path) {
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  return path;
}

fs::path resolve_checkpoint(const std::string& given) {
  const auto path = without_slashes(given);
  return is_there(path) || !checkpoint::torch_xla_files(path).empty() ? fs::path(path) : find_checkpoint(path);
}

fs::path resolve_rank_files(const fs::path& prefix, const std::string& suffix) {
  if (!suffix.empty()) return prefix.string() + suffix;
  const auto all = prefix.string() + "*.pth";
  const bool is_known = is_there(prefix) || !checkpoint::step_folders(prefix).empty() || !checkpoint::torch_xla_files(prefix).empty();
  return !is_known && !checkpoint::torch_xla_files(all).empty() ? fs::path(all) : resolve_checkpoint(prefix.string());
}

fs::path resolve_tensors(const std::string& given) {
  const auto path = resolve_checkpoint(given);
  const bool is_adapter = is_there(path / checkpoint::kAdapterConfig) && !checkpoint::is_hub_folder(path) && !checkpoint::is_complete(path);
  return is_adapter ? checkpoint::adapter_weights(path) : path;
}

void expect_apart(const std::string& in, const std::string& out) {
  if (is_there(in)) checkpoint::expect_outside(out, in);
  checkpoint::expect_no_run(without_slashes(out));
}

void add_place(CLI::App& command, std::string& place, const std::string& description) {
  command.add_option("PATH,--ckpt-prefix", place, description)->type_name("P")->required();
}

int64_t bytes_of(const std::string& text) {
  static const std::map<std::string, double> kUnits = {{"", 1}, {"B", 1}, {"KB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"TB", 1e12}};
  size_t end = 0;
  double number = 0;
  try {
    number = std::stod(text, &end);
  } catch (const std::exception&) {
    end = std::string::npos;
  }
  auto unit = end == std::string::npos ? "none" : text.substr(end);
  unit.erase(0, unit.find_first_not_of(' '));
  std::ranges::transform(unit, unit.begin(), [](unsigned char letter) { return std::toupper(letter); });
  const auto known = kUnits.find(unit);
  if (known == kUnits.end() || !(number * known->second >= 1) || number * known->second > 1e18)
    throw ConfigError("'{}' is not a size; write 5GB, 200MB or a number of bytes", text);
  return static_cast<int64_t>(number * known->second);
}

at::ScalarType dtype_of(const std::string& name) {
  static const std::map<std::string, at::ScalarType> kDtypes = {{"fp32", at::kFloat},    {"float32", at::kFloat},
                                                                {"fp16", at::kHalf},     {"float16", at::kHalf},
                                                                {"bf16", at::kBFloat16}, {"bfloat16", at::kBFloat16}};
  const auto known = kDtypes.find(name);
  if (known == kDtypes.end()) throw ConfigError("'{}' is not a dtype for weights; write fp32, fp16 or bf16", name);
  return known->second;
}

std::function<void(const std::string&, int64_t, int64_t)> megabyte_bar(const std::string& title) {
  constexpr int64_t kMega = 1'000'000;
  return [title, bar = std::shared_ptr<train::Progress>()](const std::string& /*name*/, int64_t bytes, int64_t all) mutable {
    if (bar == nullptr) {
      bar = std::make_shared<train::Progress>(
          train::ProgressOptions{.title = title + ", MB", .steps = all / kMega, .at_end = train::AtEnd::Vanishes},
          train::Display::of(stderr));
    }
    bar->update(bytes / kMega);
  };
}

}  // namespace tessera::cli
