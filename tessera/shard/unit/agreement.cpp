#include "tessera/shard/unit/agreement.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <functional>
#include <initializer_list>
#include <map>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/comm/groups/same_on_all.h"

namespace tessera {
namespace {

std::string dtype_text(const std::optional<at::ScalarType>& dtype) {
  return dtype ? c10::toString(*dtype) : "unset";
}

/// The name of a value of an enum, given the names of all.
template <typename Enum>
std::string_view word(Enum value, std::initializer_list<std::string_view> names) {
  const auto index = static_cast<size_t>(value);
  return index < names.size() ? names.begin()[index] : "unknown";
}

/// What must be the same, one fact a line: its subject, a tab, and the rest.
std::string description_of(const std::string& name, std::span<const Candidate> sharded, std::span<const Candidate> replicated,
                           const ShardOptions& options) {
  std::vector<std::string> lines = {"the module\t" + name};
  const auto add = [&](const Candidate& candidate, std::string_view how) {
    const auto& tensor = candidate.tensor;
    lines.push_back(fmt::format("parameter '{}'\tof {} [{}], {}{}", candidate.name, c10::toString(tensor.scalar_type()),
                                fmt::join(tensor.sizes(), ", "), tensor.requires_grad() ? "trained" : "frozen", how));
    // Values are sent and divided in the order in which they lie in memory.
    if (!tensor.is_contiguous()) lines.back() += fmt::format(", strides [{}]", fmt::join(tensor.strides(), ", "));
    if (options.shard_dim) {
      if (const auto dim = options.shard_dim(candidate.name, tensor)) lines.back() += fmt::format(", divided along {}", *dim);
    }
    if (!candidate.other_names.empty()) lines.back() += fmt::format(", tied to {}", fmt::join(candidate.other_names, ", "));
  };
  for (const auto& candidate : sharded) add(candidate, "");
  for (const auto& candidate : replicated) add(candidate, ", replicated");
  const auto shape = options.mesh.shape();
  const auto& precision = options.mixed_precision;
  const auto& after_forward = options.reshard_after_forward;
  const auto option = [&](std::string_view option_name, const auto& value) { lines.push_back(fmt::format("{}\t{}", option_name, value)); };
  option("replicas in the mesh", shape.replicate);
  option("param_dtype", dtype_text(precision.param_dtype));
  option("reduce_dtype", dtype_text(precision.reduce_dtype));
  option("buffer_dtype", dtype_text(precision.buffer_dtype));
  option("output_dtype", dtype_text(precision.output_dtype));
  option("start", word(options.start, {"Equal", "FromRank0", "Loaded"}));
  option("listing", word(options.listing, {"ByName", "Flat"}));
  option("residence", word(options.residence, {"Auto", "Gathered", "NodeShared"}));
  option("layout", word(options.layout, {"Auto", "Flat", "Rows", "WholeParameters"}));
  option("shard_size_multiple", options.shard_size_multiple);
  option("max_live_units", options.max_live_units);
  option("reshard_after_forward of inner units", after_forward.keeps(false) ? 1 : after_forward.ranks(shape.shard));
  option("reshard_after_forward of the root", after_forward.keeps(true) ? 1 : after_forward.ranks(shape.shard));
  option("backward_prefetch", word(options.backward_prefetch, {"Pre", "Post", "None"}));
  option("forward_prefetch", options.forward_prefetch);
  option("prefetch_depth", options.prefetch_depth);
  option("limit_all_gathers", options.limit_all_gathers);
  option("unused_parameters", word(options.unused_parameters, {"Refuse", "Zeros"}));
  option("offload.parameters", word(options.offload.parameters, {"Nowhere", "Host", "Disk"}));
  option("codec", options.codec ? "given" : "unset");
  option("shard_dim", options.shard_dim ? "given" : "unset");
  option("param_init_fn", options.param_init_fn ? "given" : "unset");
  return fmt::format("{}\n", fmt::join(lines, "\n"));
}

/// The texts of all ranks. Collective.
std::vector<std::string> gather_texts(const Communicator& world, const std::string& own, const Subject& subject) {
  const auto on_device = at::TensorOptions(world.traits().device);
  const auto longest = at::full({1}, static_cast<int64_t>(own.size()), on_device.dtype(at::kLong));
  world.all_reduce(longest, {.op = Reduce::Max}, subject).wait();
  const auto row = at::zeros({longest.item<int64_t>() + 1}, at::kByte);
  own.copy(reinterpret_cast<char*>(row.mutable_data_ptr<uint8_t>()), own.size());
  const auto part = row.to(world.traits().device);
  const auto whole = at::empty({part.numel() * world.size()}, part.options());
  world.all_gather(std::array{Piece{.whole = whole, .own = part}}, subject).wait();
  const auto rows = whole.cpu();
  std::vector<std::string> texts;
  for (int rank = 0; rank < world.size(); rank++) {
    texts.emplace_back(reinterpret_cast<const char*>(rows.const_data_ptr<uint8_t>()) + rank * part.numel());
  }
  return texts;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t begin = 0, end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1)
    lines.push_back(text.substr(begin, end - begin));
  return lines;
}

/// "rank 0: ...; ranks 1 and 2: ..." if the ranks have different lines.
std::string difference(const std::vector<std::string>& line_of_rank) {
  std::map<std::string, std::vector<int>> ranks_of;
  for (size_t rank = 0; rank < line_of_rank.size(); rank++) ranks_of[line_of_rank[rank]].push_back(static_cast<int>(rank));
  if (ranks_of.size() == 1) return {};
  std::vector<std::string> words;
  for (const auto& [line, ranks] : ranks_of) {
    auto text = line;
    std::ranges::replace(text, '\t', ' ');
    words.push_back(fmt::format("{}: {}", name_ranks(ranks), text));
  }
  return fmt::format("{}", fmt::join(words, "; "));
}

/// Of the first subject about which the texts differ, or of the first line if only the order differs.
std::string first_difference(const std::vector<std::string>& texts) {
  std::vector<std::vector<std::string>> lines;
  for (const auto& text : texts) lines.push_back(lines_of(text));
  for (const auto& own : lines) {
    for (const auto& line : own) {
      const auto subject = line.substr(0, line.find('\t') + 1);
      std::vector<std::string> found;
      for (const auto& other : lines) {
        const auto same = std::ranges::find_if(other, [&](const std::string& each) { return each.starts_with(subject); });
        found.push_back(same == other.end() ? "no " + subject.substr(0, subject.size() - 1) : *same);
      }
      if (auto words = difference(found); !words.empty()) return words;
    }
  }
  for (size_t i = 0; i < lines.front().size(); i++) {
    std::vector<std::string> found;
    for (const auto& own : lines) found.push_back(own[i]);
    if (auto words = difference(found); !words.empty()) return words;
  }
  return {};
}

}  // namespace

void expect_same_unit(const std::string& name, std::span<const Candidate> sharded, std::span<const Candidate> replicated,
                      const ShardOptions& options) {
  const auto& world = options.mesh.world();
  if (world.size() == 1 || world.traits().simulated || world.traits().traces) return;
  const Subject subject{.unit = name};
  const auto own = description_of(name, sharded, replicated, options);
  if (same_on_all(world, std::hash<std::string>()(own), subject)) return;
  throw DisagreementError(
      fmt::format("ranks call fully_shard for different modules, or with different options; build the same model in the same way on all of "
                  "them. {}",
                  first_difference(gather_texts(world, own, subject))));
}

}  // namespace tessera
