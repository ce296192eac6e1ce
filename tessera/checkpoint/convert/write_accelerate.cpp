// Writes Accelerate's folders, which have files of torch.save and folders of torch.distributed.checkpoint.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>

#include "tessera/base/atomic_write.h"
#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/checkpoint/convert/python_run.h"
#include "tessera/checkpoint/formats/accelerate.h"
#include "tessera/checkpoint/formats/hub.h"
#include "tessera/checkpoint/formats/torch/file.h"
#include "tessera/checkpoint/formats/torch/pickle.h"
#include "tessera/checkpoint/stored/runs.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int64_t kWords = 624;

/// Draws the words of a Mersenne twister's state, which random.setstate and numpy.random.set_state take together with the number of words
/// that are used already.
std::vector<pickle::Value> drawn_words(at::CPUGeneratorImpl& source) {
  std::vector<pickle::Value> words;
  for (int64_t i = 0; i < kWords; i++) words.emplace_back(int64_t{source.random()});
  return words;
}

/// Writes the states of a rank's generators. The generator of torch resumes; those of Python and NumPy get new states, drawn from torch's
/// generator, because the run has none.
void write_generators(const fs::path& path, const at::Tensor& state, const json& step, uint64_t save) {
  auto generator = at::detail::createCPUGenerator();
  generator.set_state(state);
  auto& draws = *at::check_generator<at::CPUGeneratorImpl>(generator);
  auto words = drawn_words(draws);
  const pickle::Tuple numpy{{"MT19937", pickle::List{drawn_words(draws)}, kWords, int64_t{0}, 0.0}};
  words.emplace_back(kWords);
  const pickle::Tuple python{{int64_t{3}, pickle::Tuple{std::move(words)}, {}}};
  TorchFileWriter writer(path,
                         pickle::Dict{{{"step", from_json(step)},
                                       {"random_state", python},
                                       {"numpy_random_seed", numpy},
                                       {accelerate::kTorchGenerator, pickle::Tensor{state.scalar_type(), state.sizes().vec()}}}},
                         save);
  writer.write(state);
  writer.close();
}

/// Writes the notes that belong to an object into the object's file: "scheduler.last_epoch" into scheduler.bin.
void write_objects(const RunSource& source, const fs::path& folder) {
  std::map<std::string, pickle::Dict> files;
  for (const auto& [name, text] : source.notes()) {
    if (name == "step" || name == kSettingsNote) continue;
    const auto dot = name.find('.');
    const auto object = name.substr(0, dot);
    const auto is_one_of = [&](std::string_view kind) { return object == kind || object.starts_with(std::string(kind) + "_"); };
    const auto* const extension = is_one_of("custom_checkpoint")                         ? ".pkl"
                                  : object == "scaler"                                   ? ".pt"
                                  : is_one_of("scheduler") || is_one_of("dl_state_dict") ? ".bin"
                                                                                         : nullptr;
    if (extension == nullptr || dot == std::string::npos) {
      source.leave_out(name, "Accelerate has no place for a note of this name");
    } else {
      files[object + extension].entries.emplace_back(name.substr(dot + 1), from_json(value_of_note(text)));
    }
  }
  for (auto& [name, dict] : files) TorchFileWriter(folder / name, std::move(dict), source.run().save).close();
}

void write_folder(const RunSource& source, const fs::path& folder) {
  const std::string model = accelerate::kModel, optimizer = accelerate::kOptimizer;
  const bool has_optimizer = !source.run().optimizer.empty();
  if (source.options().accelerate_layout == AccelerateLayout::Sharded) {
    write_dcp_folder(source, folder / (model + "_0"), [&] { return python_model(source); });
    if (has_optimizer) write_dcp_folder(source, folder / (optimizer + "_0"), [&] { return python_optimizer(source); });
    return;
  }
  const bool is_replicated = source.options().accelerate_layout == AccelerateLayout::Replicated;
  if (is_replicated) {
    write_safetensors(source, folder / kHubSafetensors.single);
  } else {
    write_torch_file(source, folder / (model + ".bin"), python_model(source), 1, source.run().save);
  }
  if (!has_optimizer) return;
  PythonEntries entries;
  source.on_each([&] { entries = python_optimizer(source, is_replicated); });
  write_torch_file(source, folder / (optimizer + ".bin"), entries, 1, source.run().save);
}

}  // namespace

std::vector<fs::path> write_accelerate(const RunSource& source, const fs::path& out) {
  source.in_new_folder(out, [&](const fs::path& folder) {
    std::vector<std::string> own;  // names of the generator files of this process's ranks
    write_folder(source, folder);
    source.on_each([&] {
      if (source.options().weights_only) return;
      const auto notes = source.notes();
      const auto step = notes.find("step");
      for (const int rank : source.ranks()) {
        const auto state = generator_of(source, rank);
        if (!state.defined()) break;
        own.push_back(fmt::format("{}{}.pkl", accelerate::kGenerators, rank));
        write_generators(folder / own.back(), state, step == notes.end() ? json(0) : value_of_note(step->second), source.run().save);
      }
      if (source.is_first()) write_objects(source, folder);
      for (const auto& tensor : source.beside()) source.leave_out(tensor.key, kStandsBeside);
    });
    const auto all = source.texts(json(own).dump());
    source.on_first([&] {
      for (const auto& text : all) {
        for (const auto& name : json::parse(text).get<std::vector<std::string>>()) {
          if (is_there(folder / name)) continue;
          throw IoError("{} is written, but rank 0 does not see it; save where all ranks see the same files and no other job writes",
                        folder / name);
        }
      }
    });
  });
  return {out};
}

}  // namespace tessera::checkpoint
