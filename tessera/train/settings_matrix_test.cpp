// Measures what each key of a configuration changes in a run, and makes the table of these effects in the guide.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <cmath>
#include <fstream>
#include <functional>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/comm/threads/run_ranks.h"
#include "tessera/config/keys.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/call.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/report.h"
#include "tessera/train/trainer.h"
#include "tests/testing/folder.h"
#include "tests/testing/page.h"

namespace tessera::testing::settings_matrix_test {
namespace {

using Pairs = std::map<std::string, std::string>;

std::atomic<int> scaled = 0;

/// An operator that counts how often it runs.
TORCH_LIBRARY(example, library) {
  library.def("scale(Tensor x, Tensor scale) -> Tensor", [](const at::Tensor& x, const at::Tensor& scale) {
    scaled++;
    return x * scale;
  });
}

at::Tensor scale_by(const at::Tensor& x, const at::Tensor& scale) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("example::scale", "").typed<at::Tensor(const at::Tensor&, const at::Tensor&)>();
  return op.call(x, scale);
}

/// The folders of files without names that this process has mapped into memory.
std::set<std::string> folders_of_mapped_files() {
  std::set<std::string> folders;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const auto begin = line.find('/'), end = line.rfind("/#");
    if (begin != std::string::npos && end != std::string::npos && begin < end) folders.insert(line.substr(begin, end - begin));
  }
  return folders;
}

/// A layer of two halves and a buffer, which counts how often it is computed.
struct BlockImpl : torch::nn::Module {
  torch::nn::Linear first = register_module("first", torch::nn::Linear(8, 8)), second = register_module("second", torch::nn::Linear(8, 8));
  at::Tensor scale = register_buffer("scale", torch::ones({8}));
  inline static std::atomic<int> calls = 0;
  inline static thread_local std::function<void()> on_gradient = {};  // of this rank, before the backward pass of each half

  at::Tensor forward(const at::Tensor& x) {
    calls++;
    return watched(second(scale_by(watched(first(x)), scale)));
  }
  static at::Tensor watched(at::Tensor x) {
    if (on_gradient && x.requires_grad()) x.register_hook([](const at::Tensor& /*gradient*/) { on_gradient(); });
    return x;
  }
};
TORCH_MODULE(Block);

constexpr int kRanks = 4, kLayers = 3;

torch::nn::Sequential make_model() {
  torch::nn::Sequential model;
  for (int i = 0; i < kLayers; i++) model->push_back(Block());
  const torch::NoGradGuard no_grad;
  int64_t number = 0;
  for (auto& parameter : model->parameters()) {
    if (!parameter.is_meta())
      parameter.copy_(at::arange(parameter.numel()).view_as(parameter).sub(30.0 + static_cast<double>(number++)) * 1e-3);
  }
  return model;
}

/// Observations of a run, by their names in the table.
using Seen = std::map<std::string, std::string>;

/// Returns names for the folders, in which that of the test is called FOLDER.
std::vector<std::string> named(const std::set<std::string>& folders, const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const auto& each : folders)
    names.push_back(each.starts_with(folder.string()) ? "FOLDER" + each.substr(folder.string().size()) : "the folder for temporary files");
  return names;
}

void train_on(const Communicator& world, const Pairs& settings, const std::filesystem::path& folder, Seen& seen, std::atomic<int>& makers) {
  Trainer trainer({.world = world, .settings = settings, .adjust_sharding = [&](ShardOptions& options) {
                     if (!settings.contains("tessera_residence")) options.residence = Residence::Gathered;
                   }});
  makers += trainer.needs_values() ? 1 : 0;
  auto model = trainer.make_model(make_model);
  trainer.prepare(model);
  optim::SGD optimizer(parameters(*model), {.lr = 0.1});
  trainer.prepare(optimizer);
  const auto before = trainer.get_state_dict(*model);
  at::Tensor output;
  std::set<std::string> mapped;
  std::string gradients;
  std::vector<uint64_t> gathers;
  for (int step = 0; step < 2; step++) {
    gathers.clear();
    const auto begin = counters(*model).gathers;
    BlockImpl::on_gradient = [&] {
      gathers.push_back(counters(*model).gathers - begin);
      mapped.merge(folders_of_mapped_files());
    };
    const auto accumulation = trainer.accumulate();
    output = call(model, torch::ones({2, 8}));
    trainer.backward(output.to(at::kFloat).pow(2).sum());
    const auto all = parameters(*model);
    const auto trained = std::ranges::find_if(all, [](const at::Tensor& parameter) { return parameter.grad().defined(); });
    gradients = c10::toString(trained == all.end() ? at::kFloat : trained->grad().scalar_type());
    trainer.step();
  }
  trainer.log({{"loss", 1.0}});
  trainer.end_training();
  BlockImpl::on_gradient = {};
  const auto after = trainer.get_state_dict(*model);
  const auto trained = counters(*model);
  const auto text = describe(*model);
  int64_t sharded = 0;
  std::vector<int64_t> own;
  for (const auto& parameter : model->parameters()) {
    const auto info = shard_info(parameter);
    sharded += info ? 1 : 0;
    int64_t values = 0;
    for (const auto& range : info ? info->ranges : std::vector<ValueRange>()) values += range.numel;
    if (own.size() < 4) own.push_back(values);
  }
  {
    const torch::NoGradGuard no_grad;
    for (int pass = 0; pass < 2; pass++) call(model, torch::ones({2, 8}));
    reset_counters(*model);
    if (settings.contains("fsdp_activation_checkpointing")) {
      call(model, torch::ones({2, 8}));
    } else {
      model->ptr<BlockImpl>(0)->forward(torch::ones({2, 8}));
    }
  }
  const auto of_one_layer = counters(*model).gathers;
  trainer.save_state(folder);
  if (!world.is_first()) return;
  double change = 0;
  for (const auto& [name, value] : after) change += (value - before.at(name)).pow(2).sum().item<double>();
  seen = {{"gathers", fmt::format("{}", trained.gathers)},
          {"gathers of a step before each half of the layers in backward", fmt::format("{}", fmt::join(gathers, " "))},
          {"received bytes", fmt::format("{}", trained.gathered_bytes)},
          {"reductions", fmt::format("{}", trained.reductions)},
          {"largest unsharded bytes", fmt::format("{}", trained.peak_unsharded_bytes)},
          {"units", fmt::format("{}", std::ranges::count(text, '\n') - 3)},
          {"parameters of the optimizer", fmt::format("{}", parameters(*model).size())},
          {"sharded parameters", fmt::format("{}", sharded)},
          {"values of the first layer's parameters on rank 0", fmt::format("{}", fmt::join(own, " "))},
          {"dtype of gradients", gradients},
          {"reports", fmt::format("{}", fmt::join(names_in(folder.parent_path() / "reports").value_or(std::vector<std::string>()), ", "))},
          {"values in files of", fmt::format("{}", fmt::join(named(mapped, folder.parent_path()), ", "))},
          {"dtype of results", c10::toString(output.scalar_type())},
          {"dtype of buffers", c10::toString(model->ptr<BlockImpl>(0)->scale.scalar_type())},
          {"change of the parameters", fmt::format("{:.3g}", std::sqrt(change))},
          {"units gathered by the first layer alone",
           settings.contains("fsdp_activation_checkpointing") ? "" : fmt::format("{}", of_one_layer)},
          {"saved", fmt::format("{}", fmt::join(names_in(folder).value(), ", "))}};
}

/// Says with which values ranks begin if they have made different ones.
std::string beginning(const Pairs& settings) {
  std::string text = "the values of rank 0";
  try {
    run_ranks(2, [&](const Communicator& world) {
      Trainer trainer({.world = world, .settings = settings});
      torch::nn::Linear model(4, 4);
      const torch::NoGradGuard no_grad;
      model->weight.fill_(world.rank());
      trainer.prepare(model);
      model->forward(torch::ones({1, 4}));
    });
  } catch (const UsageError&) {
    text = "refused";
  }
  return text;
}

/// Observes two steps on four ranks of two hosts, or of one host, whose ranks may share memory. Only the error if the settings are refused.
Seen observe(Pairs settings) {
  const Folder folder;
  std::filesystem::create_directory(folder / "offload");
  for (auto& [key, value] : settings) {
    if (value.starts_with("FOLDER")) value.replace(0, 6, folder.path().string());
  }
  scaled = 0;
  torch::manual_seed(1);
  Seen seen;
  std::atomic<int> makers = 0;
  BlockImpl::calls = 0;
  try {
    run_ranks(kRanks, [&](const Communicator& world) { train_on(world, settings, folder / "state", seen, makers); },
              {.host_of = settings.contains("tessera_residence") ? std::vector{0, 0, 0, 0} : std::vector{0, 0, 1, 1}});
  } catch (const ConfigError& error) {
    const std::string text = error.what();
    return {{"error", text.substr(text.find(": ") + 2)}};  // without the rank, which may be any
  }
  seen["ranks that make values"] = fmt::format("{}", makers.load());
  seen["runs of example::scale"] = fmt::format("{}", scaled.load());
  seen["layers computed"] = fmt::format("{}", BlockImpl::calls.load());
  seen["ranks that begin otherwise"] = beginning(settings.contains("fsdp_sync_module_states") ? settings : Pairs());
  return seen;
}

struct Row {
  const char* key;
  const char* value;
  Pairs beside = {};   // also set in both runs
  Pairs instead = {};  // set in the run without the key
};

const Pairs kWrapped = {{"fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"}, {"fsdp_transformer_layer_cls_to_wrap", "Block"}};
const Pairs kUnwrapped = {{"fsdp_auto_wrap_policy", "NO_WRAP"}};
const Pairs kBySize = {{"fsdp_auto_wrap_policy", "SIZE_BASED_WRAP"}};

const std::vector<Row> kRows = {
    {"distributed_type", "NO"},
    {"distributed_type", "MULTI_CPU"},
    {"distributed_type", "MULTI_GPU"},
    {"distributed_type", "XLA"},
    {"mixed_precision", "bf16"},
    {"mixed_precision", "fp16"},
    {"gradient_accumulation_steps", "2"},
    {"gradient_clipping", "0.001"},
    {"fsdp_version", "2", {{"mixed_precision", "bf16"}}},
    {"fsdp_sharding_strategy", "SHARD_GRAD_OP"},
    {"fsdp_sharding_strategy", "NO_SHARD"},
    {"fsdp_sharding_strategy", "HYBRID_SHARD"},
    {"fsdp_sharding_strategy", "HYBRID_SHARD_ZERO2"},
    {"fsdp_reshard_after_forward", "SHARD_GRAD_OP"},
    {"fsdp_reshard_after_forward", "NO_SHARD"},
    {"fsdp_reshard_after_forward", "HYBRID_SHARD"},
    {"fsdp_reshard_after_forward", "HYBRID_SHARD_ZERO2"},
    {"fsdp_reshard_after_forward", "false", {{"fsdp_version", "2"}}},
    {"fsdp_offload_params", "true"},
    {"fsdp_auto_wrap_policy", "NO_WRAP"},
    {"fsdp_transformer_layer_cls_to_wrap", "Block", {}, kUnwrapped},
    {"fsdp_min_num_params", "50", kBySize},
    {"fsdp_backward_prefetch", "BACKWARD_POST"},
    {"fsdp_backward_prefetch", "NO_PREFETCH"},
    {"fsdp_forward_prefetch", "false"},
    {"fsdp_use_orig_params", "false"},
    {"fsdp_cpu_ram_efficient_loading", "true"},
    {"fsdp_sync_module_states", "false"},
    {"fsdp_activation_checkpointing", "true", kUnwrapped},
    {"fsdp_state_dict_type", "SHARDED_STATE_DICT"},
    {"fsdp_state_dict_type", "FULL_STATE_DICT"},
    {"fsdp_state_dict_type", "LOCAL_STATE_DICT", {}, {{"fsdp_state_dict_type", "SHARDED_STATE_DICT"}}},
    {"fsdp_ignored_modules", "0.*"},
    {"tessera_residence", "gathered", {}, {{"tessera_residence", "auto"}}},
    {"tessera_residence", "node-shared", {}, {{"tessera_residence", "gathered"}}},
    {"tessera_layout", "rows"},
    {"tessera_layout", "whole-parameters"},
    {"tessera_codec", "bf16"},
    {"tessera_grad_dtype", "fp64"},
    {"tessera_reshard_ranks", "2"},
    {"tessera_prefetch_depth", "2", {{"tessera_max_live_units", "3"}}},
    {"tessera_max_live_units", "1"},
    {"tessera_limit_all_gathers", "false", {{"tessera_prefetch_depth", "2"}}},
    {"tessera_unused_parameters", "zeros"},
    {"tessera_quantisation", "int8", {{"tessera_lora_r", "2"}}},
    {"tessera_lora_r", "2"},
    {"tessera_lora_alpha", "4", {{"tessera_lora_r", "2"}}},
    {"tessera_lora_dropout", "0.99999", {{"tessera_lora_r", "2"}}},  // of all values, whatever is drawn
    {"tessera_lora_rslora", "true", {{"tessera_lora_r", "2"}}},
    {"tessera_lora_dora", "true", {{"tessera_lora_r", "2"}}},
    {"tessera_lora_target_modules", "first", {{"tessera_lora_r", "2"}}},
    {"tessera_lora_modules_to_save", "second", {{"tessera_lora_r", "2"}}},
    {"tessera_lora_bias", "all", {{"tessera_lora_r", "2"}}},
    {"tessera_offload", "disk"},
    {"tessera_offload", "host"},
    {"tessera_offload_folder", "FOLDER/offload", {{"tessera_offload", "disk"}}},
    {"tessera_activation_offload", "disk", {{"fsdp_activation_checkpointing", "true"}}},
    {"tessera_activation_keep", "example::scale", {{"fsdp_activation_checkpointing", "true"}}},
    {"tessera_checkpoint_format", "accelerate"},
    {"tessera_log_with", "FOLDER/reports/log.jsonl"},
    {"parallelism_config_dp_replicate_size", "4"},
    {"parallelism_config_dp_shard_size",
     "2",
     {{"parallelism_config_dp_replicate_size", "2"}},
     {{"parallelism_config_dp_replicate_size", "4"}}},
};

// Effects on launch itself, and the tests in which they are observed.
const std::map<std::string_view, const char*> kOfLaunch = {
    {"num_processes", "so many ranks begin (`cli/launch/launch`)"},
    {"num_machines", "so many launchers wait for each other (`cli/launch/nodes`)"},
    {"machine_rank", "the ranks of this machine are numbered after those of machines before it (`cli/launch/nodes`)"},
    {"main_process_ip", "launchers and ranks meet there (`cli/launch/nodes`)"},
    {"main_process_port", "launchers meet there (`cli/launch/nodes`)"},
    {"gpu_ids", "ranks have it in `CUDA_VISIBLE_DEVICES` (`cli/launch/restarts`)"},
    {"enable_cpu_affinity", "each rank may use other processors (`cli/launch/restarts`)"},
    {"tessera_transport", "ranks talk over it (`cli/launch/launch`)"},
    {"use_cpu", "ranks train on the CPU, whatever `TESSERA_DEVICE` says (`train/trainer`)"},
};

Pairs joined(Pairs all, const Pairs& more) {
  for (const auto& [key, value] : more) all[key] = value;
  return all;
}

/// Returns "gathers 12 becomes 6, ...", or an empty text if the two runs look the same.
std::string difference(const Seen& before, const Seen& after) {
  if (const auto error = after.find("error"); error != after.end()) return "refused: " + error->second.substr(0, error->second.find(';'));
  std::vector<std::string> changes;
  for (const auto& [name, value] : after) {
    const auto& other = before.at(name);
    if (value != other && !value.empty()) changes.push_back(fmt::format("{}: {}, not {}", name, value, other));
  }
  return fmt::format("{}", fmt::join(changes, "; "));
}

TEST(SettingsMatrix, EachKeyHasItsEffect) {
  std::map<Pairs, Seen> known;
  const auto seen_with = [&](Pairs settings) -> const Seen& {
    const auto [entry, is_new] = known.try_emplace(settings);
    if (is_new) entry->second = observe(settings);
    return entry->second;
  };
  std::string table = "\n| key | value | what changes |\n| --- | --- | --- |\n";
  std::set<std::string_view> shown;
  for (const auto& row : kRows) {
    const auto is_of_policy =
        row.beside.contains("fsdp_auto_wrap_policy") || std::string_view(row.key) == "fsdp_transformer_layer_cls_to_wrap";
    const auto around = joined(is_of_policy ? Pairs() : kWrapped, row.beside);
    Pairs set = {{row.key, row.value}};
    if (std::string_view(row.key) == "fsdp_auto_wrap_policy") set["fsdp_transformer_layer_cls_to_wrap"] = "";
    if (std::string_view(row.key) == "fsdp_transformer_layer_cls_to_wrap") set["fsdp_auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP";
    const auto effect = difference(seen_with(joined(around, row.instead)), seen_with(joined(around, set)));
    EXPECT_FALSE(effect.empty()) << row.key << " " << row.value << " changes nothing";
    table += fmt::format("| `{}` | `{}` | {} |\n", row.key, row.value, effect);
    shown.insert(row.key);
  }
  for (const auto& [key, effect] : kOfLaunch) {
    table += fmt::format("| `{}` |  | {} |\n", key, effect);
    shown.insert(key);
  }
  for (const auto& key : config::keys()) {
    EXPECT_TRUE(shown.contains(key.name) || !has_effect(key)) << key.name << " is in no row";
  }
  constexpr std::string_view kBegin = "<!-- Measured by a test: TESSERA_TEST_WRITE_PAGES=1 ./check train/settings_matrix -->\n",
                             kEnd = "\n<!-- end -->\n";
  auto page = read_file(TESSERA_ROOT "/docs/tables/configuration-keys.md");
  const auto begin = page.find(kBegin), end = page.find(kEnd);
  ASSERT_LT(begin, end);
  ASSERT_NE(end, std::string::npos);
  page.replace(begin + kBegin.size(), end - begin - kBegin.size(), table);
  expect_page(TESSERA_ROOT "/docs/tables/configuration-keys.md", page, "train/settings_matrix");
}

}  // namespace
}  // namespace tessera::testing::settings_matrix_test
