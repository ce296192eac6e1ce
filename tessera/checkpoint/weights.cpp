#include "tessera/checkpoint/weights.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include <set>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/checkpoint/formats/safetensors.h"
#include "tessera/checkpoint/part_records.h"
#include "tessera/checkpoint/rank_file.h"
#include "tessera/shard/access/phases.h"
#include "tessera/shard/access/write_guard.h"

namespace tessera::checkpoint {
namespace {

/// Maps each tensor of a model to the tensor in the file from which it is loaded.
class Plan {
 public:
  explicit Plan(const SafetensorsFile& file) : file_(file) {
    for (const auto& name : file.names()) unknown_.insert(name);
  }

  /// Adds a tensor of the model. The file may have it under any of the names.
  void add(const std::string& name, const std::vector<std::string>& aliases, at::IntArrayRef sizes) {
    auto candidates = aliases;
    candidates.insert(candidates.begin(), name);
    // consolidate() saves a tied parameter once. The metadata maps its other names to the one that is used.
    for (const auto& candidate : std::vector(candidates)) {
      if (const auto first = file_.metadata().find(candidate); first != file_.metadata().end()) candidates.push_back(first->second);
    }
    for (const auto& candidate : candidates) {
      if (!file_.contains(candidate)) continue;
      unknown_.erase(candidate);
      if (file_.info(candidate).sizes != sizes) {
        throw IoError(fmt::format("{}: '{}' has the shape [{}], in the model it has [{}]", file_.path().string(), candidate,
                                  fmt::join(file_.info(candidate).sizes, ", "), fmt::join(sizes, ", ")));
      }
      found_.try_emplace(name, candidate);
    }
    if (!found_.contains(name)) missing_.push_back(name);
  }

  void expect_all() const {
    std::vector<std::string> faults;
    if (!missing_.empty()) faults.push_back("it has no " + some_of(missing_));
    if (!unknown_.empty()) faults.push_back("the model has no " + some_of({unknown_.begin(), unknown_.end()}));
    if (!faults.empty()) throw IoError(fmt::format("{} is of another model: {}", file_.path().string(), fmt::join(faults, "; ")));
    for (const auto& [name, candidate] : found_) file_.verify(candidate);
  }

  at::Tensor read(const std::string& name) const { return file_.read(found_.at(name)); }

 private:
  const SafetensorsFile& file_;
  std::set<std::string> unknown_;
  std::vector<std::string> missing_;
  std::map<std::string, std::string> found_;
};

/// Copies from the full parameter the parts of all ranks that this process represents.
void copy_part(const LocalPart& part, const at::Tensor& full, const Communicator& world) {
  std::vector<at::Tensor> values;
  const auto records = records_of(part);
  for (const auto& record : records) {
    const auto& value = values.emplace_back(at::empty({record.numel()}, full.options()));
    const auto views = views_of_slices(value, record.slices, record.strides);
    for (size_t i = 0; i < views.size(); i++) views[i].copy_(view_of(full, record.slices[i]));
  }
  part.values.copy_(tensor_of_ranks(std::move(values), part.values, records, world));
}

}  // namespace

void load_weights(torch::nn::Module& module, const std::filesystem::path& path) {
  expect_idle("load_weights");
  const SafetensorsFile file(path);
  const auto model = local_values(module);
  std::map<std::string, std::vector<std::string>> aliases;
  for (const auto& [alias, first] : model.aliases) aliases[first].push_back(alias);
  Plan plan(file);
  for (const auto& part : model.parts) plan.add(part.name, aliases[part.name], part.shape);
  for (const auto& [name, tensor] : model.outside) plan.add(name, aliases[name], tensor.sizes());
  for (const auto& [name, tensor] : model.buffers) plan.add(name, {}, tensor.sizes());
  plan.expect_all();

  const c10::AutoGradMode no_grad(false);
  const WriteGuard guard(model.units, WriteKind::Load);
  const auto now = local_values(module);  // the guard may have moved shards into other memory
  for (const auto& part : now.parts) copy_part(part, plan.read(part.name), model.world());
  for (const auto& [name, tensor] : model.outside) tensor.copy_(plan.read(name));
  for (const auto& [name, tensor] : model.buffers) tensor.copy_(plan.read(name));
}

}  // namespace tessera::checkpoint
