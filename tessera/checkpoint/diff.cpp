#include "tessera/checkpoint/diff.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/table.h"
#include "tessera/base/words.h"
#include "tessera/checkpoint/convert/pieces.h"
#include "tessera/checkpoint/stored/optimizer_keys.h"
#include "tessera/checkpoint/stored/rank_file.h"
#include "tessera/checkpoint/stored/runs.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

/// A checkpoint, and its tensors under names that are comparable between the two checkpoints.
struct Side {
  explicit Side(const fs::path& path) : run(read_run(path)), stored(run.catalog) { stored.verify_headers(); }

  void take_names(const std::string& other_optimizer) {
    for (const auto& [name, tensor] : run.catalog.tensors) {
      if (!is_optimizer_state(name, run)) {
        names[name] = name;
        continue;
      }
      const auto [parameter, key] = state_name(name);
      const auto known = run.optimizer == other_optimizer ? key : torch_key(run.optimizer, key);
      if (!known.empty()) names[fmt::format("{}{}.{}", kOptimizerPrefix, parameter, known)] = name;
    }
  }

  /// Returns the stored name of a tensor, or of the tensor that it is tied to; empty if the checkpoint has neither.
  std::string find(const std::string& name) const {
    if (const auto own = names.find(name); own != names.end()) return own->second;
    const auto alias = run.catalog.aliases.find(name);
    const auto first = alias == run.catalog.aliases.end() ? names.end() : names.find(alias->second);
    return first == names.end() ? "" : first->second;
  }

  Manifest run;
  CatalogReader stored;
  std::map<std::string, std::string> names;  // from a tensor's comparable name to its stored name
};

std::string text_of(const StoredTensor& tensor) {
  return fmt::format("{} [{}]", c10::toString(tensor.dtype), fmt::join(tensor.shape, ", "));
}

at::Tensor as_numbers(const at::Tensor& values) {
  // libtorch can't convert packed 4-bit numbers, so their bytes are compared.
  return values.scalar_type() == at::kFloat4_e2m1fn_x2 ? values.view(at::kByte).to(at::kDouble) : values.to(at::kDouble);
}

/// Adds the differences of one piece to the result.
void compare(const at::Tensor& one, const at::Tensor& other, TensorDifference& result) {
  if (at::isComplexType(one.scalar_type()) || at::isComplexType(other.scalar_type())) {
    return compare(at::view_as_real(one.to(at::kComplexDouble)), at::view_as_real(other.to(at::kComplexDouble)), result);
  }
  const bool is_exact = at::isIntegralType(one.scalar_type(), true) && at::isIntegralType(other.scalar_type(), true);
  const auto x = as_numbers(one), y = as_numbers(other);
  const auto same = is_exact ? one.to(at::kLong) == other.to(at::kLong) : (x == y).logical_or(x.isnan().logical_and(y.isnan()));
  const auto count = same.logical_not().sum().item<int64_t>();
  if (count == 0) return;
  result.values += count;
  constexpr auto kInfinity = std::numeric_limits<double>::infinity();
  const auto distance = at::nan_to_num((x - y).abs().masked_fill(same, 0), kInfinity, kInfinity);
  const auto relative = at::nan_to_num((distance / at::max(x.abs(), y.abs())).masked_fill(same, 0), kInfinity, kInfinity);
  result.largest = std::max(result.largest, distance.max().item<double>());
  result.largest_relative = std::max(result.largest_relative, relative.max().item<double>());
}

}  // namespace

Difference diff(const fs::path& one_path, const fs::path& other_path, const DiffOptions& options) {
  if (options.memory < 1) throw UsageError("{} bytes of memory hold no tensor", options.memory);
  Side one(one_path), other(other_path);
  one.take_names(other.run.optimizer);
  other.take_names(one.run.optimizer);
  Difference result;
  std::map<std::string, std::pair<std::string, std::string>> common;
  for (const auto& [name, stored] : one.names) {
    const auto there = other.find(name);
    if (there.empty()) {
      result.only_one.push_back(name);
    } else {
      common[name] = {stored, there};
    }
  }
  for (const auto& [name, stored] : other.names) {
    if (const auto there = one.find(name); there.empty()) {
      result.only_other.push_back(name);
    } else {
      common[name] = {there, stored};
    }
  }
  int64_t bytes = 0, all = 0;
  for (const auto& [name, stored] : common) {
    const auto& tensor = one.stored.info(stored.first);
    all += c10::multiply_integers(tensor.shape) * static_cast<int64_t>(c10::elementSize(tensor.dtype));
  }
  for (const auto& [name, stored] : common) {
    const auto &here = one.stored.info(stored.first), &there = other.stored.info(stored.second);
    TensorDifference found{.name = name, .one = text_of(here), .other = text_of(there)};
    if (here.shape == there.shape) {
      // A piece needs about six times its size in doubles: both tensors, and the temporaries of the comparison.
      const auto most = std::max<int64_t>(options.memory / (6 * int64_t{sizeof(double)}), 1);
      for_each_piece(whole_slice(here.shape), most, [&](const TensorSlice& piece) {
        const at::TensorOptions host(at::kCPU);
        const auto x = at::empty(piece.sizes, host.dtype(here.dtype)), y = at::empty(piece.sizes, host.dtype(there.dtype));
        one.stored.read(stored.first, piece, x);
        other.stored.read(stored.second, piece, y);
        compare(x, y, found);
        bytes += static_cast<int64_t>(x.nbytes());
        if (options.progress) options.progress(name, bytes, all);
      });
    }
    // Tessera counts steps in integers, PyTorch in floats.
    const bool is_count = here.shape.empty() && name.starts_with(kOptimizerPrefix) && state_name(name).key == "step";
    if (found.values == 0 && (found.one == found.other || is_count)) {
      result.equal++;
    } else {
      result.different.push_back(std::move(found));
    }
  }
  return result;
}

std::string to_json(const Difference& difference) {
  using Json = nlohmann::ordered_json;
  Json result = {
      {"equal", difference.equal}, {"only_one", difference.only_one}, {"only_other", difference.only_other}, {"different", Json::object()}};
  auto& different = result["different"].get_ref<Json::object_t&>();
  for (const auto& tensor : difference.different) {
    // For each name, operator[] would search all earlier names.
    different.emplace_back(tensor.name, Json{{"one", tensor.one},
                                             {"other", tensor.other},
                                             {"values", tensor.values},
                                             {"largest", tensor.largest},
                                             {"largest_relative", tensor.largest_relative}});
  }
  return result.dump(2, ' ', false, Json::error_handler_t::replace);
}

std::string to_table(const Difference& difference) {
  std::string text;
  for (const auto& name : difference.only_one) text += fmt::format("only in the first: {}\n", printable(name));
  for (const auto& name : difference.only_other) text += fmt::format("only in the second: {}\n", printable(name));
  std::vector<std::array<std::string, 5>> rows = {{"tensor", "kind", "values", "absolute", "relative"}};
  for (const auto& tensor : difference.different) {
    rows.push_back({printable(tensor.name), tensor.one == tensor.other ? tensor.one : tensor.one + " / " + tensor.other,
                    std::to_string(tensor.values), fmt::format("{:.4g}", tensor.largest), fmt::format("{:.4g}", tensor.largest_relative)});
  }
  if (rows.size() > 1) text += table_of(rows, "<<>>>");
  const auto others = difference.only_one.size() + difference.only_other.size() + difference.different.size();
  text += fmt::format("{} {} equal, {} {} not\n", counted(difference.equal, "tensor"), difference.equal == 1 ? "is" : "are", others,
                      others == 1 ? "is" : "are");
  return text;
}

}  // namespace tessera::checkpoint
