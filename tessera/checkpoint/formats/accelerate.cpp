#include "tessera/checkpoint/formats/accelerate.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/checkpoint/formats/dcp/dcp.h"
#include "tessera/checkpoint/formats/hub.h"
#include "tessera/checkpoint/formats/torch/archive.h"
#include "tessera/checkpoint/formats/torch/file.h"
#include "tessera/checkpoint/formats/torch/pickle.h"
#include "tessera/checkpoint/stored/rank_file.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

/// The beginnings of the names of files that each hold the values of one object.
constexpr std::array kStateFiles = {"scheduler", "scaler", "sampler", "dl_state_dict", "custom_checkpoint"};

std::vector<std::string> names_inside(const fs::path& folder) {
  return names_in(folder).value_or(std::vector<std::string>());
}

class AccelerateReader {
 public:
  explicit AccelerateReader(fs::path folder) : folder_(std::move(folder)) {}

  Catalog read() {
    add_generators();
    const std::string model = accelerate::kModel, optimizer = accelerate::kOptimizer;
    if (!add_part(model, "model.") && is_hub_folder(folder_)) append(all_, read_hub_folder(folder_), "model.");  // saved without FSDP
    add_part(optimizer, "optimizer.");
    for (const auto& name : names_inside(folder_)) {
      const auto is_part_of = [&](const std::string& kind) { return name.starts_with(kind + "_") && name != kind + "_0"; };
      if (is_part_of(model) || is_part_of(optimizer)) {
        all_.left_out.emplace(name, "it is of another model or optimizer than the first, or of FSDP's LOCAL_STATE_DICT");
      }
      for (const auto* kind : kStateFiles) {
        if (name.starts_with(kind) && fs::path(name).has_extension()) add_values(name);
      }
    }
    return std::move(all_);
  }

 private:
  /// Adds the state of torch's generator from each rank's file, and the step of gradient accumulation.
  void add_generators() {
    StoredTensor state{.dtype = at::kByte};
    for (size_t rank = 0;; rank++) {
      const auto path = folder_ / fmt::format("{}{}.pkl", accelerate::kGenerators, rank);
      if (!is_there(path)) break;
      const TorchArchive archive{InputFile(path)};
      note_save(all_, archive.save(), path);
      const auto& content = archive.content();
      const auto tensor = archive.tensor(content[accelerate::kTorchGenerator], accelerate::kTorchGenerator);
      if (!tensor || tensor->dtype != at::kByte || (rank > 0 && tensor->shape != state.shape)) {
        all_.left_out.emplace(path.filename().string(), "it has no state of torch's generator, or one of another size than rank 0's");
        return;
      }
      state.shape = tensor->shape;
      state.boxes.push_back(tensor->stored_in(all_.files.size()));
      tensor->add_checksum(all_, all_.files.size(), accelerate::kTorchGenerator);
      all_.files.push_back(path);
      if (const auto* const step = content["step"].as<int64_t>()) all_.values["step"] = *step;
    }
    if (!state.boxes.empty()) all_.tensors.emplace(kGeneratorName, std::move(state));
  }

  /// Adds a folder of DCP or a file of torch.save. Returns false if neither is there.
  bool add_part(const std::string& name, const std::string& before) {
    if (is_there(folder_ / (name + "_0"))) {
      add_dcp(folder_ / (name + "_0"), before);
    } else if (is_there(folder_ / (name + ".bin"))) {
      append(all_, read_torch_file(folder_ / (name + ".bin")), before);
    } else {
      return false;
    }
    return true;
  }

  /// Adds a DCP folder. Accelerate puts everything under `key`; older versions did not.
  void add_dcp(const fs::path& folder, const std::string& key) {
    auto part = read_dcp(folder);
    const auto has_key = [&](const auto& entry) { return entry.first.starts_with(key); };
    const bool all_have = std::ranges::all_of(part.tensors, has_key) && std::ranges::all_of(part.values, has_key);
    append(all_, std::move(part), all_have ? "" : key);
  }

  /// Adds the plain values in a file. A file that can't be read is left out, since weights load without it.
  void add_values(const std::string& name) {
    std::optional<InputFile> file;
    std::optional<TorchArchive> archive;
    try {
      file.emplace(folder_ / name);
      archive.emplace(*file);
    } catch (const IoError& error) {
      all_.left_out.emplace(name, error.what());
      if (auto fault = file ? fault_of_zip(*file) : std::nullopt) all_.faults.push_back(std::move(*fault));
      return;
    }
    note_save(all_, archive->save(), file->path());
    const auto* const dict = archive->content().as<pickle::Dict>();
    if (dict == nullptr) {
      all_.left_out.emplace(name, kNoPlainData);
      return;
    }
    const auto stem = fs::path(name).stem().string();
    for (const auto& [key, value] : dict->entries) {
      const auto last = to_name(key);
      auto json = to_json(value);
      const auto whole = stem + "." + last.value_or(std::string(key.kind()));
      if (last && json) {
        all_.values.insert_or_assign(whole, std::move(*json));
      } else {
        all_.left_out.emplace(whole, kNoPlainData);
      }
    }
  }

  const fs::path folder_;
  Catalog all_;
};

}  // namespace

bool is_accelerate_folder(const fs::path& folder) {
  const std::string model = accelerate::kModel;
  if (is_there(folder / (model + "_0")) || is_there(folder / (model + ".bin"))) return true;
  return is_hub_folder(folder) && is_there(folder / (accelerate::kGenerators + std::string("0.pkl")));
}

bool is_accelerate_file(const fs::path& file) {
  const auto name = file.filename().string();
  const auto begins = [&](const char* kind) { return name.starts_with(kind); };
  return file.has_extension() && (begins(accelerate::kModel) || begins(accelerate::kOptimizer) || begins(accelerate::kGenerators) ||
                                  is_hub_file(name) || std::ranges::any_of(kStateFiles, begins));
}

Catalog read_accelerate(const fs::path& folder) {
  return AccelerateReader(folder).read();
}

}  // namespace tessera::checkpoint
