// Reads and writes adapters in the files of Python's PEFT: a folder with adapter_config.json and adapter_model.safetensors, or
// adapter_model.bin of older versions.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "tessera/base/module_ref.h"
#include "tessera/comm/communicator.h"
#include "tessera/nn/lora.h"

namespace tessera::checkpoint {

struct AdapterFile {
  std::string adapter = "default";
  std::string base = {};       // base_model_name_or_path in adapter_config.json, for people and for peft
  std::string task_type = {};  // such as "CAUSAL_LM"; with it, PEFT can load the base by itself
};

/// Writes an adapter that PeftModel.from_pretrained can read. Throws UsageError for a folder with a model. Collective.
void save_adapter(ConstModuleRef model, const std::filesystem::path& folder, const Communicator& world, const AdapterFile& options = {});

/// Reads the options of a stored adapter, for lora::apply. Throws ConfigError, which names the key, for a setting that Tessera lacks, and
/// IoError for a damaged file.
lora::Options read_adapter_config(const std::filesystem::path& folder);
/// Loads the values in a folder into an adapter that lora::apply has made. Throws UsageError, and changes nothing, if the files don't fit
/// the model's adapter. Each rank reads its own part.
void load_adapter(ModuleRef model, const std::filesystem::path& folder, const std::string& adapter = "default");

/// An adapter as it is in its files, for use without the model.
struct PlainAdapter {
  lora::Options options = {};
  std::map<std::string, lora::Weights> layers = {};  // by the names of the layers in the model
  std::vector<std::string> others = {};              // the other tensors of the file: biases, modules_to_save
};
/// Reads a stored adapter. Throws as read_adapter_config does, and IoError if a layer lacks one of its tensors.
PlainAdapter read_adapter(const std::filesystem::path& folder);
/// Throws UsageError for a PiSSA adapter: it was split off the weights of the base, so it does not fit the whole base.
void expect_on_whole_base(const PlainAdapter& adapter, const std::filesystem::path& folder);
/// Writes the options and layers of an adapter. Throws UsageError for a folder with a model.
void write_adapter(const std::filesystem::path& folder, const PlainAdapter& adapter, const AdapterFile& about = {});
/// Throws UsageError for a folder with a model or a checkpoint: programs would load an adapter there together with the
/// model, or in place of the checkpoint.
void expect_no_model(const std::filesystem::path& folder);

/// Merges an adapter into a model from files of any format, tensor by tensor, and writes the result as a Hugging Face folder. Throws
/// UsageError, and writes nothing, if the adapter is of another model, or can't be merged into the weights.
std::vector<std::filesystem::path> merge_adapter(const std::filesystem::path& base, const std::filesystem::path& adapter,
                                                 const std::filesystem::path& out, int64_t max_shard_size = 5'000'000'000);

}  // namespace tessera::checkpoint
