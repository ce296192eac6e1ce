// `tessera ckpt merge`, `convert` and `reshard`.
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <memory>

#include "tessera/base/error.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/merge.h"
#include "tessera/cli/ckpt_places.h"

namespace tessera::cli {
namespace {

using checkpoint::Format;

const std::map<std::string, Format>& formats() {
  static const std::map<std::string, Format> kFormats = {{"tessera", Format::Tessera},   {"dcp", Format::Dcp},
                                                         {"hub", Format::Hub},           {"safetensors", Format::Safetensors},
                                                         {"torch", Format::Torch},       {"accelerate", Format::Accelerate},
                                                         {"torch_xla", Format::TorchXla}};
  return kFormats;
}

Format format_named(const std::string& name) {
  if (const auto known = formats().find(name); known != formats().end()) return known->second;
  std::string all;
  for (const auto& [each, format] : formats()) all += (all.empty() ? "" : ", ") + each;
  throw ConfigError(fmt::format("'{}' is no format; write one of {}", name, all));
}

/// "lr=0.001" as a setting of an optimizer.
std::pair<std::string, nlohmann::json> setting_of(const std::string& text) {
  const auto end = text.find('=');
  if (end == std::string::npos || end == 0) throw ConfigError(fmt::format("--set {}: write NAME=VALUE, such as lr=0.001", text));
  auto value = nlohmann::json::parse(text.substr(end + 1), nullptr, false);
  if (value.is_discarded()) throw ConfigError(fmt::format("--set {}: the value is neither a number nor other JSON", text));
  return {text.substr(0, end), std::move(value)};
}

void print_done(const std::filesystem::path& from, const std::string& out, const std::vector<std::filesystem::path>& files, int64_t tensors,
                int64_t bytes) {
  fmt::print("{} -> {}: {} tensors, {} bytes in {} file{}\n", from.string(), files.size() == 1 ? files.front().string() : out, tensors,
             bytes, files.size(), files.size() == 1 ? "" : "s");
}

struct MergeCommand {
  std::string from, out, max_shard_size = "5GB", dtype;
  bool unsafe_serialization = false, remove_checkpoint_dir = false;

  int run() const {
    checkpoint::MergeOptions options{.max_shard_size = bytes_of(max_shard_size),
                                     .unsafe_serialization = unsafe_serialization,
                                     .remove_checkpoint_dir = remove_checkpoint_dir,
                                     .progress = megabyte_bar("merging")};
    if (!dtype.empty()) options.dtype = dtype_of(dtype);
    const auto folder = place_of(from);
    const auto merged = checkpoint::merge(folder, out, options);
    options.progress = {};
    print_done(folder, out, merged.files, merged.tensors, merged.bytes);
    return 0;
  }
};

struct ConvertCommand {
  std::string in, out, to = "tessera", from, max_shard_size = "5GB", dtype, memory = "1GB";
  std::vector<std::string> settings;
  int world = 1;
  bool weights_only = false, full = false, notes_of_first_rank = false;

  int run() const {
    checkpoint::ConvertOptions options{.to = format_named(to),
                                       .world = world,
                                       .weights_only = weights_only,
                                       .max_shard_size = bytes_of(max_shard_size),
                                       .full_state_dict = full,
                                       .notes_of_first_rank = notes_of_first_rank,
                                       .memory = bytes_of(memory),
                                       .progress = megabyte_bar("converting")};
    const auto expect_meaning = [&](bool given, const char* flag, std::initializer_list<Format> formats) {
      if (!given || std::ranges::find(formats, options.to) != formats.end()) return;
      throw ConfigError(fmt::format("{} means nothing for --to {}", flag, to));
    };
    expect_meaning(world != 1, "--world", {Format::Tessera, Format::Dcp, Format::Accelerate, Format::TorchXla});
    expect_meaning(!settings.empty(), "--set", {Format::Dcp, Format::Torch, Format::Accelerate});
    if (!from.empty()) options.from = format_named(from);
    if (!dtype.empty()) options.dtype = dtype_of(dtype);
    for (const auto& text : settings) options.settings.insert(setting_of(text));
    const auto place = place_of(in);
    const auto target = without_slashes(out);
    const auto done = checkpoint::convert(place, target, options);
    options.progress = {};
    for (const auto& [name, why] : done.left_out) fmt::print(stderr, "{} is left out: {}\n", name, why);
    fmt::print("{} -> {}: {}, {} tensors, {} bytes\n", place.string(), target, checkpoint::name_of(options.to), done.tensors, done.bytes);
    return 0;
  }
};

void add_common(CLI::App& command, ConvertCommand& options) {
  command.add_option("IN", options.in, "The checkpoint: a folder or a file, or the P of folders P-step-N")->required();
  command.add_option("OUT", options.out, "The folder or the file to write")->required();
  command.add_option("--memory", options.memory, "Bytes of a tensor that are in memory at once")->type_name("SIZE")->capture_default_str();
  command.add_flag("--notes-of-first-rank", options.notes_of_first_rank, "Where notes differ by rank and can't, take those of rank 0");
}

}  // namespace

void add_merge(CLI::App& command, const std::string& name, std::function<int()>& chosen) {
  auto* merge = command.add_subcommand(name, "Makes files with the whole model of a checkpoint of any format")->group("Commands");
  const auto options = std::make_shared<MergeCommand>();
  merge->add_option("IN", options->from, "The checkpoint: a folder or a file, or the P of folders P-step-N")->required();
  merge->add_option("OUT", options->out, "The folder for model.safetensors")->required();
  merge->add_option("--max-shard-size", options->max_shard_size, "The largest file; if the model is larger, there are several and an index")
      ->type_name("SIZE")
      ->capture_default_str();
  merge->add_option("--dtype", options->dtype, "fp32, fp16 or bf16; that of the checkpoint unless given")->type_name("DTYPE");
  merge->add_flag("--unsafe-serialization", options->unsafe_serialization, "Write pytorch_model.bin, a file of torch.save");
  merge->add_flag("--remove-checkpoint-dir", options->remove_checkpoint_dir, "Remove IN when all is written");
  merge->callback([&chosen, options] { chosen = [=] { return options->run(); }; });
}

void add_convert(CLI::App& command, std::function<int()>& chosen) {
  auto* convert = command.add_subcommand("convert", "Writes a checkpoint of any format in another format")->group("Commands");
  const auto options = std::make_shared<ConvertCommand>();
  add_common(*convert, *options);
  convert->add_option("--to", options->to, "tessera, dcp, hub, safetensors, torch, accelerate or torch_xla")
      ->type_name("FORMAT")
      ->required();
  convert->add_option("--from", options->from, "What IN has to be; it is recognised unless given")->type_name("FORMAT");
  convert->add_option("--world", options->world, "The number of ranks whose files are written")->type_name("M")->capture_default_str();
  convert->add_option("--dtype", options->dtype, "fp32, fp16 or bf16 for the model; that of the checkpoint unless given")
      ->type_name("DTYPE");
  convert->add_option("--max-shard-size", options->max_shard_size, "The largest file of a Hub folder")
      ->type_name("SIZE")
      ->capture_default_str();
  convert->add_flag("--weights-only", options->weights_only, "Leave the optimizer and all else out");
  convert->add_flag("--full", options->full, "Of Accelerate's folders those of FULL_STATE_DICT");
  convert->add_option("--set", options->settings, "A setting of the optimizer for Python, such as lr=0.001; may be repeated")
      ->type_name("NAME=VALUE");
  convert->callback([&chosen, options] { chosen = [=] { return options->run(); }; });
}

void add_reshard(CLI::App& command, std::function<int()>& chosen) {
  auto* reshard = command.add_subcommand("reshard", "Writes a checkpoint of Tessera for another number of ranks")->group("Commands");
  const auto options = std::make_shared<ConvertCommand>();
  add_common(*reshard, *options);
  reshard->add_option("--world", options->world, "The number of ranks")->type_name("M")->required();
  reshard->callback([&chosen, options] { chosen = [=] { return options->run(); }; });
}

}  // namespace tessera::cli
