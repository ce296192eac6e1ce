// `tessera ckpt merge`, `convert` and `reshard`.
#include "tessera/cli/ckpt/convert.h"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <regex>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/words.h"
#include "tessera/checkpoint/format_table.h"
#include "tessera/checkpoint/formats/gguf/gguf.h"
#include "tessera/checkpoint/formats/hub.h"
#include "tessera/checkpoint/merge.h"
#include "tessera/cli/ckpt/places.h"
#include "tessera/cli/help.h"
#include "tessera/cli/known_words.h"
#include "tessera/cli/packages.h"

namespace tessera::cli {
namespace {

using checkpoint::Format;

/// Whether `convert` can write the format, by the function in its row or by a package.
bool is_written(const checkpoint::FormatRow& row) {
  return row.write != nullptr || !row.package.empty();
}

std::string names_of_formats(const std::string& separator, bool written) {
  std::set<std::string_view> names;
  for (const auto& row : checkpoint::format_rows()) {
    if (!written || is_written(row)) names.insert(row.flag);
  }
  return joined(names, separator);
}

const checkpoint::FormatRow& format_named(const std::string& name, bool written) {
  const auto rows = checkpoint::format_rows();
  const auto row = std::ranges::find(rows, name, &checkpoint::FormatRow::flag);
  if (row == rows.end()) throw ConfigError("'{}' is not a format; write one of {}", name, names_of_formats(", ", written));
  return *row;
}

/// Splits "lr=0.001" into the name and the value of an optimizer's setting.
std::pair<std::string, std::string> named_setting(const std::string& text) {
  const auto end = text.find('=');
  if (end == std::string::npos || end == 0) throw ConfigError("--set {}: write NAME=VALUE, such as lr=0.001", text);
  auto value = text.substr(end + 1);
  const auto read = nlohmann::json::parse(value, nullptr, /*allow_exceptions=*/false);
  if (read.is_discarded() || read.is_object())
    throw ConfigError(
        "--set {}: the value is not a number, true, false, null, or a text or list in JSON; write NAME=VALUE, such as lr=0.001", text);
  return {text.substr(0, end), std::move(value)};
}

/// Replaces the options that an error of the library names, such as `.weights_only = true`, by flags of the command line.
std::string in_flags(std::string text) {
  static const std::pair<std::regex, const char*> kFlags[] = {
      {std::regex(R"--(\.settings = \{\{"(\w+)", ([^}]+)\}\})--"), "--set $1=$2"},
      {std::regex(R"(\{\.notes_of_first_rank = true\})"), "--notes-of-first-rank"},
      {std::regex(R"(\.weights_only = true)"), "--weights-only"},
  };
  for (const auto& [words, flag] : kFlags) text = std::regex_replace(text, words, flag);
  return text;
}

struct MergeCommand {
  std::string from, suffix, out;
  checkpoint::MergeOptions options;

  int run() {
    options.progress = megabyte_bar("merging");
    const auto folder = resolve_rank_files(without_slashes(from), suffix);
    const auto merged = checkpoint::merge(folder, out, options);
    options.progress = {};
    const auto& files = merged.files;
    fmt::print("{} -> {}: {}, {} in {}\n", folder.string(), files.size() == 1 ? files.front().string() : out,
               counted(merged.tensors, "tensor"), counted(merged.bytes, "byte"), counted(std::ssize(files), "file"));
    return 0;
  }
};

/// The flags that have an effect for some formats only, each with an option of conversions. The flag has an effect for formats whose row
/// takes the option or, if the option is empty, for formats that have a write function. No flag has an effect for adapters.
constexpr std::pair<const char*, std::string_view> kFormatFlags[] = {{"--world", "world"},
                                                                     {"--set", "settings"},
                                                                     {"--full", "accelerate_layout"},
                                                                     {"--replicated", "accelerate_layout"},
                                                                     {"--max-shard-size", "max_shard_size"},
                                                                     {"--code", "code"},
                                                                     {"--dtype", ""},
                                                                     {"--memory", ""},
                                                                     {"--weights-only", ""},
                                                                     {"--notes-of-first-rank", "notes_of_first_rank"}};

std::optional<ModelConversions> of_models;

/// Throws ConfigError for a given flag that has no effect for the format, or for an adapter.
void expect_meaning(const CLI::App& command, const ConvertCommand& convert, bool is_adapter) {
  const auto& row = checkpoint::row_of(convert.options.to);
  for (const auto& [flag, option] : kFormatFlags) {
    const bool means_something = option.empty() ? row.write != nullptr : row.takes(option);
    const auto* const given = command.get_option_no_throw(flag);
    if (given == nullptr || given->count() == 0 || (!is_adapter && means_something)) continue;
    throw ConfigError("{} means nothing for {}", flag, is_adapter ? "an adapter" : "--to " + convert.to);
  }
}

/// Whether the conversion needs the package models: for an adapter, a GGUF file, or the description of a model.
bool needs_models(const std::filesystem::path& place, Format to) {
  if (to == Format::Gguf) return true;
  if (!is_folder(place)) return is_there(place) && checkpoint::is_gguf_file(place);
  return is_there(place / checkpoint::kAdapterConfig) || (to == Format::Hub && is_there(place / "config.json"));
}

int run(ConvertCommand& convert, const CLI::App& command) try {
  auto& options = convert.options;
  const auto place = resolve_checkpoint(convert.in);
  const auto target = without_slashes(convert.out);
  if (of_models && of_models->is_adapter(place)) {
    expect_meaning(command, convert, true);
    of_models->convert_adapter(convert, place, target);
    return 0;
  }
  if (!of_models && needs_models(place, options.to)) expect_package("models", fmt::format("{} as {}", place.string(), convert.to));
  if (!convert.base.empty()) throw ConfigError("--base is for adapters, and {} is not one; leave it out", place);
  if (options.to == Format::Gguf) {
    of_models->write_gguf(convert, place, target);
    return 0;
  }
  options.progress = megabyte_bar("converting");
  const auto done = checkpoint::convert(place, target, options);
  options.progress = {};
  if (of_models && options.to == Format::Hub) of_models->describe(convert, place, target);
  for (const auto& [name, why] : done.left_out) fmt::print(stderr, "{}\n", printable(fmt::format("{} is left out: {}", name, why)));
  fmt::print("{} -> {}: {}, {}, {}\n", place.string(), target, checkpoint::name_of(options.to), counted(done.tensors, "tensor"),
             counted(done.bytes, "byte"));
  return 0;
} catch (const UsageError& error) {
  throw UsageError(in_flags(error.what()));
}

void add_common(CLI::App& command, ConvertCommand& convert) {
  command.add_option("IN", convert.in, "The checkpoint: a folder or a file, or the P of folders P-step-N")->required();
  command.add_option("OUT", convert.out, "The folder or the file to write")->required();
  command.add_option("--world", convert.options.world, "For how many ranks files are written")
      ->type_name("M")
      ->check(from_to(1, checkpoint::kMostRanks));
  add_value(command, "--memory", convert.options.memory, bytes_of, "How many bytes of a tensor are in memory at once")
      ->type_name("SIZE")
      ->default_str("1GB");
  command.add_flag("--notes-of-first-rank", convert.options.notes_of_first_rank,
                   "Take the notes of rank 0 where notes differ by rank and the format keeps one set");
}

void choose_on(CLI::App& command, const std::shared_ptr<ConvertCommand>& convert, std::function<int()>& chosen) {
  command.callback([&chosen, convert, &command] {
    expect_meaning(command, *convert, false);
    expect_apart(convert->in, convert->out);
    checkpoint::expect_ending_of(without_slashes(convert->out), convert->options.to);
    chosen = [convert, &command] { return run(*convert, command); };
  });
}

}  // namespace

AddedConversions::AddedConversions(const ModelConversions& conversions) {
  of_models = conversions;
}

void print_file(const ConvertCommand& command, const std::filesystem::path& place, const std::string& target, const std::string& what) {
  fmt::print("{} -> {}: {} {}, {}\n", place.string(), target, checkpoint::name_of(command.options.to), what,
             counted(static_cast<int64_t>(size_of_file(target).value_or(0)), "byte"));
}

void add_merge(CLI::App& command, const std::string& name, std::function<int()>& chosen) {
  auto* flags = command.add_subcommand(name, "Writes the whole model of a checkpoint of any format");
  const auto merge = std::make_shared<MergeCommand>();
  auto& options = merge->options;
  flags
      ->add_option("IN,--ckpt-prefix", merge->from,
                   "The checkpoint: a folder or a file, or the P of folders P-step-N or of rank files of torch_xla")
      ->type_name("P")
      ->required();
  flags->add_option("--ckpt-suffix", merge->suffix, "The end of the names of torch_xla's files after P, such as *.pth")
      ->type_name("S");
  flags->add_option("OUT", merge->out, "The folder for model.safetensors")->required();
  add_value(*flags, "--max-shard-size", options.max_shard_size, bytes_of,
            "The largest file; if the model is larger, there are several and an index")
      ->type_name("SIZE")
      ->default_str("5GB");
  add_value(*flags, "--dtype", options.dtype, dtype_of, "The dtype of the files; that of the checkpoint unless given")->type_name("{fp32,fp16,bf16}");
  flags->add_flag("--unsafe-serialization", options.unsafe_serialization, "Write pytorch_model.bin, a file of torch.save");
  flags->add_flag("--remove-checkpoint-dir", options.remove_checkpoint_dir, "Remove IN when all is written");
  const auto program = (command.get_parent() != nullptr ? "tessera ckpt " : "tessera ") + name;
  flags->footer(Help::footer_of({program + " run/mnist merged", program + " run/mnist merged --dtype bf16 --max-shard-size 2GB"}));
  flags->callback([&chosen, merge] {
    expect_apart(merge->from, merge->out);
    chosen = [=] { return merge->run(); };
  });
}

void add_convert(CLI::App& command, std::function<int()>& chosen) {
  auto* flags = command.add_subcommand("convert", "Writes a checkpoint of any format, or an adapter, in another format");
  const auto convert = std::make_shared<ConvertCommand>();
  auto& options = convert->options;
  add_common(*flags, *convert);
  const auto named = [raw = convert.get()](const std::string& name) {
    raw->to = name;
    const auto& row = format_named(name, true);
    if (!is_written(row)) throw ConfigError(std::string(row.unwritten));
    return row.format;
  };
  add_value(*flags, "--to", options.to, named, "The format to write")->type_name("{" + names_of_formats(",", true) + "}")->required();
  add_value(
      *flags, "--from", options.from, [](const std::string& name) { return format_named(name, false).format; },
      "The format of IN; it is recognised unless given")
      ->type_name("{" + names_of_formats(",", false) + "}");
  flags->get_option("--world")->capture_default_str();
  add_value(*flags, "--dtype", options.dtype, dtype_of, "The dtype of the model; that of the checkpoint unless given")->type_name("{fp32,fp16,bf16}");
  add_value(*flags, "--max-shard-size", options.max_shard_size, bytes_of, "The largest file of a Hub folder")
      ->type_name("SIZE")
      ->default_str("5GB");
  flags->add_option("--code", convert->code, "The type of matrices in a GGUF file")
      ->capture_default_str()
      ->check(CLI::IsMember({"F32", "F16", "BF16", "Q8_0", "Q5_0", "Q4_0", "Q4_K"}));
  flags->add_option("--base", convert->base, "The model that an adapter was trained on")->type_name("MODEL");
  flags->add_flag("--weights-only", options.weights_only, "Leave out the optimizer and all that is not weights");
  using checkpoint::AccelerateLayout;
  const auto layout = [&options](AccelerateLayout chosen) { return [&options, chosen] { options.accelerate_layout = chosen; }; };
  auto* const full = flags->add_flag_callback("--full", layout(AccelerateLayout::Full), "With --to accelerate, write the layout of FULL_STATE_DICT");
  flags->add_flag_callback("--replicated", layout(AccelerateLayout::Replicated), "With --to accelerate, write the layout of a run without FSDP")
      ->excludes(full);
  flags
      ->add_option_function<std::vector<std::string>>(
          "--set",
          [&options](const std::vector<std::string>& texts) {
            for (const auto& text : texts) {
              const auto [name, value] = named_setting(text);
              options.settings[name] = value;
            }
          },
          "A setting of the optimizer for Python, such as lr=0.001; may be repeated")
      ->type_name("NAME=VALUE");
  flags->footer(Help::footer_of({"tessera ckpt convert run/mnist hub --to hub --dtype bf16",
                                 "tessera ckpt convert accelerate/run ours --to tessera --world 4",
                                 "tessera ckpt convert run/adapter adapter.gguf --to gguf --base SmolLM2-135M"}));
  choose_on(*flags, convert, chosen);
}

void add_reshard(CLI::App& command, std::function<int()>& chosen) {
  auto* flags = command.add_subcommand("reshard", "Writes a checkpoint of Tessera for another number of ranks");
  const auto convert = std::make_shared<ConvertCommand>();
  add_common(*flags, *convert);
  flags->get_option("--world")->required();
  flags->footer(Help::footer_of({"tessera ckpt reshard run/mnist-step-000100 run/mnist-on-8 --world 8"}));
  choose_on(*flags, convert, chosen);
}

}  // namespace tessera::cli
