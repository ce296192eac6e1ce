// Writes a run for Python: folders of torch.distributed.checkpoint, files of torch.save, and Accelerate's folders of both.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>

#include <algorithm>

#include "tessera/base/atomic_write.h"
#include "tessera/base/error.h"
#include "tessera/checkpoint/convert/run_source.h"
#include "tessera/checkpoint/formats/accelerate.h"
#include "tessera/checkpoint/formats/dcp.h"
#include "tessera/checkpoint/formats/torch_file.h"
#include "tessera/checkpoint/live/generator_state.h"
#include "tessera/checkpoint/stored/rank_file.h"
#include "tessera/checkpoint/stored/runs.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

at::Tensor generator_of(const RunSource& source, int rank) {
  const auto generator = read_generator(source.stored(), source.run(), rank);
  return generator ? generator->get_state() : at::Tensor();
}

/// Tied parameters as Python's state dicts have them: under each name.
std::vector<std::pair<std::string, const SourceTensor*>> named_model(const RunSource& source) {
  std::vector<std::pair<std::string, const SourceTensor*>> result;
  for (const auto& tensor : source.model()) result.emplace_back(tensor.name, &tensor);
  for (const auto& [alias, name] : source.run().catalog.aliases) {
    const auto first = std::ranges::find(source.model(), name, &SourceTensor::name);
    if (first != source.model().end()) result.emplace_back(alias, &*first);
  }
  return result;
}

/// What the optimizer of Python keeps.
std::vector<SourceTensor> python_state(const RunSource& source) {
  std::vector<SourceTensor> result;
  for (auto tensor : source.state()) {
    if (tensor.key.empty()) continue;
    tensor.dtype = RunSource::python_dtype(tensor);
    result.push_back(tensor);
  }
  return result;
}

/// The notes that stand beside the model and the optimizer.
std::map<std::string, json> values_of_notes(const RunSource& source) {
  std::map<std::string, json> result;
  for (const auto& [name, text] : source.notes()) {
    if (name == kSettingsNote) continue;
    const auto begin = name.substr(0, name.find('.'));
    if (begin == "model" || begin == "optimizer")
      throw UsageError(fmt::format("the note '{}' would be taken for a part of the {}; give it another name", name, begin));
    result[name] = value_of_note(text);
  }
  return result;
}

// Folders of torch.distributed.checkpoint.

/// One folder that is written by as many ranks as the options say, in this process.
class DcpFolder {
 public:
  DcpFolder(const RunSource& source, const fs::path& folder) : source_(source), folder_(folder) {
    std::error_code error;
    fs::create_directories(folder, error);
    if (error) throw IoError(fmt::format("can't create the folder {}: {}", folder.string(), error.message()));
    for (int rank = 0; rank < source.options().world; rank++) writers_.push_back(std::make_unique<DcpRankWriter>(folder, rank));
  }

  /// Rows as FSDP divides them.
  void add(const DcpPath& path, const SourceTensor& tensor) {
    const auto ranks = std::ssize(writers_);
    const auto rows = tensor.shape.empty() ? 1 : tensor.shape.front();
    const auto each = std::max<int64_t>((rows + ranks - 1) / ranks, 1);
    for (int64_t rank = 0; rank < ranks && (rank == 0 || rank * each < rows); rank++) {
      auto box = whole_slice(tensor.shape);
      if (!tensor.shape.empty()) {
        box.offsets.front() = rank * each;
        box.sizes.front() = std::min(each, rows - rank * each);
      }
      auto& writer = *writers_[static_cast<size_t>(rank)];
      source_.copy(tensor, box, [&](const TensorSlice& piece, const at::Tensor& values) { writer.write(path, piece, values); });
    }
  }
  void add(const DcpPath& path, const json& value) { writers_.front()->write(path, value); }
  void add(const DcpPath& path, const at::Tensor& tensor) { writers_.front()->write(path, whole_slice(tensor.sizes()), tensor); }

  void add_model() {
    for (const auto& [name, tensor] : named_model(source_)) add({"model", name}, *tensor);
  }
  void add_optimizer() {
    for (const auto& tensor : python_state(source_)) add({"optimizer", "state", tensor.parameter, tensor.key}, tensor);
    int64_t number = 0;
    for (const auto& group : source_.settings()) {
      for (const auto& [key, value] : group.items()) add({"optimizer", "param_groups", number, key}, value);
      number++;
    }
  }

  void close() {
    std::vector<DcpItem> items;
    for (const auto& writer : writers_) std::ranges::move(writer->close(), std::back_inserter(items));
    write_dcp_metadata(folder_, items);
  }

 private:
  const RunSource& source_;
  const fs::path folder_;
  std::vector<std::unique_ptr<DcpRankWriter>> writers_;
};

// Files of torch.save.

/// A tree, and the tensors in it in its order.
class TreeFile {
 public:
  explicit TreeFile(const RunSource& source) : source_(source) {}

  TorchTree model() {
    TorchTree::Dict dict;
    std::map<std::string, TorchTree::Tensor> first;
    for (const auto& [name, tensor] : named_model(source_)) {
      auto& place = first[tensor->name];
      if (place == nullptr) place = add(*tensor);
      dict.entries.emplace_back(name, TorchTree{place});
    }
    return {std::move(dict)};
  }
  TorchTree optimizer() {
    TorchTree::Dict state;
    for (const auto& tensor : python_state(source_)) {
      if (state.entries.empty() || state.entries.back().first != TorchTree::Key(tensor.parameter))
        state.entries.emplace_back(tensor.parameter, TorchTree{TorchTree::Dict{}});
      std::get<TorchTree::Dict>(state.entries.back().second.value).entries.emplace_back(tensor.key, TorchTree{add(tensor)});
    }
    return {TorchTree::Dict{{{"state", TorchTree{std::move(state)}}, {"param_groups", TorchTree{source_.settings()}}}}};
  }

  void write(const fs::path& path, const TorchTree& tree) {
    TorchFileWriter writer(path, tree);
    for (const auto& tensor : tensors_) source_.copy(tensor, [&](const at::Tensor& values) { writer.append(values); });
    writer.close();
  }

 private:
  TorchTree::Tensor add(const SourceTensor& tensor) {
    tensors_.push_back(tensor);
    return std::make_shared<TorchTensor>(TorchTensor{.dtype = tensor.dtype, .shape = tensor.shape});
  }

  const RunSource& source_;
  std::vector<SourceTensor> tensors_;
};

// Accelerate's folders.

constexpr int kWords = 624;

/// What random.setstate and numpy.random.set_state take: the words of a Mersenne twister, and the number of those that are used up.
TorchTree::List drawn_words(at::CPUGeneratorImpl& source) {
  TorchTree::List words;
  for (int i = 0; i < kWords; i++) words.items.emplace_back().value.emplace<json>(source.random());
  return words;
}

/// Torch's generator goes on. We know nothing of Python's and NumPy's, so they begin anew, each rank's in another state.
void write_generators(const fs::path& path, const at::Tensor& state, const json& step) {
  auto generator = at::detail::createCPUGenerator();
  generator.set_state(state);
  auto& draws = *at::check_generator<at::CPUGeneratorImpl>(generator);
  const auto tensor = std::make_shared<TorchTensor>(TorchTensor{.dtype = state.scalar_type(), .shape = state.sizes().vec()});
  auto words = drawn_words(draws);
  const TorchTree numpy{TorchTree::Tuple{{{json("MT19937")}, {drawn_words(draws)}, {json(kWords)}, {json(0)}, {json(0.0)}}}};
  words.items.emplace_back().value.emplace<json>(kWords);
  const TorchTree python{TorchTree::Tuple{{{json(3)}, {TorchTree::Tuple{std::move(words.items)}}, {json()}}}};
  TorchFileWriter writer(path, {TorchTree::Dict{{{"step", {step}},
                                                 {"random_state", python},
                                                 {"numpy_random_seed", numpy},
                                                 {accelerate::kTorchGenerator, {TorchTree::Tensor(tensor)}}}}});
  writer.write(state);
  writer.close();
}

/// Writes the notes of each object into its file, as far as they are of one: "scheduler.last_epoch" into scheduler.bin.
void write_objects(const RunSource& source, const fs::path& folder, std::map<std::string, std::string>& left_out) {
  std::map<std::string, TorchTree::Dict> files;
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
      left_out.emplace(name, "Accelerate has no place for a note of this name");
    } else {
      files[object + extension].entries.emplace_back(name.substr(dot + 1), TorchTree{value_of_note(text)});
    }
  }
  for (auto& [name, dict] : files) TorchFileWriter(folder / name, {std::move(dict)}).close();
}

}  // namespace

std::vector<fs::path> write_dcp(const RunSource& source, const fs::path& out) {
  NewFolder made(out);
  DcpFolder folder(source, unfinished_path(out));
  folder.add_model();
  if (!source.run().optimizer.empty()) folder.add_optimizer();
  if (!source.options().weights_only) {
    for (const auto& [name, value] : values_of_notes(source)) folder.add({name}, value);
    if (const auto state = generator_of(source, 0); state.defined()) folder.add({kGeneratorName}, state);
  }
  folder.close();
  made.commit();
  return {out};
}

std::vector<fs::path> write_torch(const RunSource& source, const fs::path& out) {
  TreeFile file(source);
  auto model = file.model();
  if (source.options().weights_only) {
    const auto& key = source.options().model_key;
    file.write(out, key.empty() ? model : TorchTree{TorchTree::Dict{{{key, model}}}});
    return {out};
  }
  TorchTree::Dict all{{{"model", std::move(model)}}};
  if (!source.run().optimizer.empty()) all.entries.emplace_back("optimizer", file.optimizer());
  for (const auto& [name, value] : values_of_notes(source)) all.entries.emplace_back(name, TorchTree{value});
  file.write(out, {std::move(all)});
  return {out};
}

std::vector<fs::path> write_accelerate(const RunSource& source, const fs::path& out, std::map<std::string, std::string>& left_out) {
  NewFolder made(out);
  const auto folder = unfinished_path(out);
  const std::string model = accelerate::kModel, optimizer = accelerate::kOptimizer;
  const bool has_optimizer = !source.run().optimizer.empty();
  if (source.options().full_state_dict) {
    TreeFile weights(source);
    weights.write(folder / (model + ".bin"), weights.model());
    TreeFile state(source);
    if (has_optimizer) state.write(folder / (optimizer + ".bin"), state.optimizer());
  } else {
    DcpFolder weights(source, folder / (model + "_0"));
    weights.add_model();
    weights.close();
    if (has_optimizer) {
      DcpFolder state(source, folder / (optimizer + "_0"));
      state.add_optimizer();
      state.close();
    }
  }
  if (!source.options().weights_only) {
    const auto notes = source.notes();
    const auto step = notes.find("step");
    for (int rank = 0; rank < source.options().world; rank++) {
      const auto state = generator_of(source, rank);
      if (!state.defined()) break;
      write_generators(folder / fmt::format("{}{}.pkl", accelerate::kGenerators, rank), state,
                       step == notes.end() ? json(0) : value_of_note(step->second));
    }
    write_objects(source, folder, left_out);
  }
  made.commit();
  return {out};
}

}  // namespace tessera::checkpoint
