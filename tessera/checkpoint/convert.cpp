#include "tessera/checkpoint/convert.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <functional>
#include <random>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/storage.h"
#include "tessera/checkpoint/convert/run_source.h"
#include "tessera/checkpoint/format_table.h"
#include "tessera/checkpoint/formats/accelerate.h"
#include "tessera/checkpoint/formats/gguf/gguf.h"
#include "tessera/checkpoint/formats/hub.h"
#include "tessera/checkpoint/formats/torch/file.h"
#include "tessera/checkpoint/step_folders.h"
#include "tessera/checkpoint/stored/catalogs.h"
#include "tessera/checkpoint/stored/rank_file.h"
#include "tessera/checkpoint/stored/runs.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

bool is_inside(const fs::path& path, const fs::path& folder) {
  std::error_code unknown;
  const auto inner = fs::weakly_canonical(path, unknown), outer = fs::weakly_canonical(folder, unknown);
  return !unknown && std::mismatch(outer.begin(), outer.end(), inner.begin(), inner.end()).first == outer.end();
}

/// Throws UsageError for options that mean nothing for this format.
void expect_used(const ConvertOptions& options) {
  const ConvertOptions plain;
  const auto refuse = [&](const char* option) {
    throw UsageError("ConvertOptions::{} means nothing for {}{}", option, name_of(options.to),
                     options.weights_only ? " with weights only" : "");
  };
  const auto& row = row_of(options.to);
  if (options.accelerate_layout != plain.accelerate_layout && !row.takes("accelerate_layout")) refuse("accelerate_layout");
  if (options.max_shard_size != plain.max_shard_size && !row.takes("max_shard_size")) refuse("max_shard_size");
  if (!options.model_key.empty() && !(row.takes("model_key") && options.weights_only)) refuse("model_key");
}

void expect_sound(const fs::path& checkpoint, const fs::path& out, const ConvertOptions& options) {
  expect_outside(out, checkpoint);
  if (options.to != Format::Safetensors && options.to != Format::Hub) expect_storable(out, options.to);  // these two are written in order
  expect_writable_as(out, options.to);
  if (options.dtype && !at::isFloatingType(*options.dtype)) {
    throw UsageError("weights can't be converted to {}; give a floating-point dtype", c10::toString(*options.dtype));
  }
  expect_used(options);
  if (options.world < 1 || options.world > kMostRanks)
    throw UsageError("a checkpoint can't be for {} ranks; give a number from 1 to {}", options.world, kMostRanks);
  if (options.memory < 1) throw UsageError("{} bytes of memory hold no tensor", options.memory);
}

Manifest model_only(const fs::path& checkpoint) {
  Manifest model{.catalog = read_model(checkpoint), .notes = {{}}};
  const auto& save = model.catalog.save;
  model.save = save ? save->number : std::random_device()();
  auto& left_out = model.catalog.left_out;
  std::erase_if(left_out, [](const auto& entry) { return entry.first.starts_with(kOptimizerPrefix); });
  return model;
}

/// Returns a hint for people who give the folder of the optimizer instead of the folder of the model.
std::string folder_of_model(const fs::path& checkpoint) {
  const auto model = checkpoint.parent_path() / (std::string(accelerate::kModel) + "_0");
  return is_there(model) ? fmt::format("; did you mean {}?", model.string()) : "";
}

}  // namespace

void expect_writable_as(const fs::path& out, Format format) {
  if (const auto& row = row_of(format); row.write == nullptr) throw UsageError(std::string(row.unwritten));
  expect_no_run(out);
  expect_ending_of(out, format);
  if (format == Format::Hub) expect_free_for_model(out);
}

void expect_storable(const fs::path& out, Format format) {
  if (format == Format::Tessera || !object_path(out)) return;
  throw UsageError("{} is in an object store, where Tessera's format can be written, but not {}; write to a local path", out,
                   name_of(format));
}

void expect_no_blocks(const Manifest& run) {
  if (!run.optimizer.ends_with("AdamW8bit")) return;
  throw UsageError(
      "the state of {} has eight bits per value, which only Tessera's format can hold; convert the weights only "
      "(.weights_only = true)",
      run.optimizer);
}

void expect_ending_of(const fs::path& out, Format format) {
  const auto ending = out.extension().string();
  const auto& row = row_of(format);
  if (row.endings.empty()) {
    if (std::ranges::none_of(format_rows(), [&](const FormatRow& each) { return each.has_ending(out); })) return;
    throw UsageError("{} is the name of a file, but {} is a folder; leave '{}' out", out, row.name, ending);
  }
  // An ending that begins with a digit is a part of the name, as in net-0.5.
  const bool is_none = ending.size() < 2 || std::isdigit(static_cast<unsigned char>(ending[1])) != 0;
  if (row.has_ending(out) || is_none) return;
  std::vector<std::string> known;
  for (const auto& each : format_rows()) {
    if (!each.endings.empty()) known.push_back(fmt::format("{} ends in {}", each.name, fmt::join(each.endings, ", ")));
  }
  throw UsageError("{} asks for another format: the name of {}", out, joined(known, "; of "));
}

void expect_outside(const fs::path& out, const fs::path& checkpoint) {
  if (!is_inside(out, checkpoint)) return;
  throw UsageError("{} lies in the checkpoint {}, whose files it could replace; write elsewhere", out, checkpoint);
}

Converted convert(const fs::path& checkpoint, const fs::path& out, const ConvertOptions& options) {
  expect_sound(checkpoint, out, options);
  Converted result{.from = format_of(checkpoint)};
  if (options.from && *options.from != result.from) {
    throw UsageError("{} is {}, not {}", checkpoint, name_of(result.from), name_of(*options.from));
  }
  if (result.from == Format::Gguf && GgufFile(checkpoint).is_adapter())
    throw UsageError("{} holds an adapter; `tessera ckpt convert {} FOLDER --to hub` converts it to a PEFT folder", checkpoint, checkpoint);
  const bool weights_only = options.weights_only || row_of(options.to).model_alone;
  auto run = weights_only ? model_only(checkpoint) : read_run(checkpoint);
  if (options.to != Format::Tessera) {
    expect_no_blocks(run);
    const auto base = result.from == Format::Tessera ? read_manifest(checkpoint).base : BaseRecord();
    if (!base.parameters.empty()) {
      throw UsageError(
          "{} holds only the trained parameters; the others are in its base, {}. Resume the run and write its adapter "
          "(checkpoint::save_adapter, or --resume --adapter FOLDER), and make a full model of both with `tessera ckpt merge-adapter`",
          checkpoint, base.name);
    }
  }
  for (const auto& file : run.catalog.files) expect_outside(out, file);
  result.left_out = run.catalog.left_out;
  const bool keeps_ranks = options.to == Format::Tessera && options.world == run.ranks;
  if (!run.device_generator.empty() && !keeps_ranks)
    result.left_out.emplace(run.device_generator, "only a checkpoint of Tessera's format for as many ranks can hold it");
  const RunSource source(std::move(run), options);
  if (source.model().empty()) {
    throw IoError("{} has no tensors of a model{}", checkpoint, folder_of_model(checkpoint));
  }
  result.tensors = std::ssize(source.model()) + std::ssize(source.state()) + std::ssize(source.beside());
  result.bytes = source.bytes();
  for (const auto& tensor : source.model()) {
    if (!source.run().catalog.buffers.contains(tensor.name)) result.parameters += c10::multiply_integers(tensor.shape);
  }
  result.files = row_of(options.to).write(source, out);
  result.left_out.insert(source.left_out().begin(), source.left_out().end());
  return result;
}

}  // namespace tessera::checkpoint
