// Trains a GPT with one technique, and reports its memory: by a formula, for each kind of memory, and as the kernel measures it.
// bench/memory runs it for each technique of its table.
#include <fmt/format.h>
#include <tessera/models/gpt.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "bench.h"

namespace {

using namespace tessera;
using bench::over_ranks, bench::own_megabytes, bench::Peak;

struct Flags {
  int64_t width = 2048, layers = 9, length = 32;
  int steps = 2;
  std::string strategy = "FULL_SHARD", weights;
  bool unsynced = false, bf16 = false, checkpointing = false, state_on_disk = false, parameters_on_disk = false;
};

class Training {
 public:
  Training(const Flags& flags, const Communicator& world)
      : flags_(flags), world_(world), model_(make_model()), optimizer_(parameters(*model_), {.lr = 1e-4, .momentum = 0.9}) {
    if (flags_.state_on_disk) optimizer_.offload_state(OffloadTo::Disk, {.folder = "."});
  }

  double step() {
    if (flags_.unsynced) {
      const auto unsynced = no_sync(*model_);
      loss().backward();
    }
    const auto last = loss();
    last.backward();
    optimizer_.step();
    optimizer_.zero_grad();
    return last.item<double>();
  }

 private:
  torch::Tensor loss() {
    const auto ids = torch::randint(options().vocabulary, {1, flags_.length + 1}, torch::kLong);
    auto x = model_->tokens(ids.slice(1, 0, -1)) + model_->positions(torch::arange(flags_.length));
    for (const auto& each : *model_->blocks) {
      const auto block = std::static_pointer_cast<models::GptBlockImpl>(each);
      x = flags_.checkpointing ? activation::checkpoint(block, x) : block->forward(x);
    }
    const auto scores = model_->head(model_->norm(x)).to(torch::kFloat);
    return torch::cross_entropy_loss(scores.flatten(0, 1), ids.slice(1, 1).flatten());
  }
  models::GptOptions options() const {
    return {.width = flags_.width, .layers = flags_.layers, .heads = flags_.width / 128, .longest = flags_.length};
  }
  models::Gpt make_model() const {
    torch::manual_seed(1);
    auto model = deferred_init([&] { return models::Gpt(options()); });
    auto chosen = sharding_strategy(world_, flags_.strategy);
    if (!flags_.weights.empty()) chosen.start = Start::Loaded;
    if (flags_.bf16) chosen.mixed_precision.param_dtype = torch::kBFloat16;
    if (flags_.parameters_on_disk) chosen.offload = {.parameters = OffloadTo::Disk, .disk = {.folder = "."}};
    fully_shard(model, chosen, wrap_classes({"GptBlock", "Embedding"}));
    if (!flags_.weights.empty()) checkpoint::load_weights(*model, flags_.weights);
    return model;
  }

  const Flags& flags_;
  const Communicator world_;
  models::Gpt model_;
  optim::SGD optimizer_;
};

/// The memory of all ranks together by the formula, in MB, for each kind of memory.
nlohmann::json formula(const Flags& flags, int ranks) {
  const auto width = static_cast<double>(flags.width), layers = static_cast<double>(flags.layers);
  const auto block = 4 * (12 * width * width + 13 * width) / 1e6;
  const auto root = 4 * width * static_cast<double>(2 * models::GptOptions().vocabulary + flags.length + 2) / 1e6;
  const auto all = layers * block + root, some = root + 2 * block;  // units that are unsharded, or not reduced, at a time
  const bool replicated = flags.strategy == "NO_SHARD", stays = flags.strategy == "SHARD_GRAD_OP";
  const double copies = replicated ? ranks : 1, computed = flags.bf16 ? 0.5 : 1;
  const auto token = computed * 4 * width * static_cast<double>(flags.length) / 1e6;
  return {{"parameters", flags.parameters_on_disk ? 0 : copies * all},
          {"gradients", copies * all},
          {"state", flags.state_on_disk ? 0 : copies * all},
          {"unsharded", replicated && !flags.bf16 ? 0 : ranks * computed * (stays ? all : some)},
          {"unreduced", ranks * computed * (flags.unsynced ? all : some)},
          {"activations", ranks * token * (flags.checkpointing ? layers + 32 : 16 * layers)}};
}

void run(const Flags& flags) {
  const auto world = init();
  {
    // Makes libraries and thread pools allocate their memory before the measurement.
    Flags small = flags;
    small.width = 128, small.layers = 1, small.weights.clear();
    Training(small, world).step();
  }
  const auto before = own_megabytes();
  auto most = before;
  const auto begin = bench::Clock::now();
  std::optional<Training> training;
  {
    const Peak peak;
    training.emplace(flags, world);
    most = peak.megabytes();
  }
  const auto seconds_to_build = bench::seconds_since(begin);
  const auto peak_of_building = over_ranks(world, most - before, Reduce::Sum);
  training->step();  // makes the optimizer's state
  world.barrier();
  double loss = 0;
  const auto seconds = bench::seconds_of([&] {
    for (int step = 0; step < flags.steps; step++) loss = training->step();
    world.barrier();
  });
  {
    const Peak peak;
    training->step();
    most = peak.megabytes();
  }
  const auto peak_of_step = over_ranks(world, most - before, Reduce::Sum);
  if (world.rank() != 0) return;
  const nlohmann::json row = {{"formula_mb", formula(flags, world.size())},
                              {"measured_mb", peak_of_step},
                              {"building_mb", peak_of_building},
                              {"building_s", seconds_to_build},
                              {"step_s", seconds / flags.steps},
                              {"loss", loss}};
  fmt::print("{}\n", row.dump());
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Trains a GPT with one technique on the ranks that tessera launch has started, and prints the memory that it takes.",
               "bench_memory");
  Flags flags;
  app.add_option("--width", flags.width)->check(CLI::Range(128, 100'000))->capture_default_str();
  app.add_option("--layers", flags.layers)->check(CLI::Range(1, 10'000))->capture_default_str();
  app.add_option("--length", flags.length, "Tokens in a step")->check(CLI::Range(1, 100'000))->capture_default_str();
  app.add_option("--steps", flags.steps)->check(CLI::Range(1, 1000))->capture_default_str();
  app.add_option("--strategy", flags.strategy)->check(CLI::IsMember({"NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD"}))->capture_default_str();
  app.add_option("--weights", flags.weights, "A file of weights to load in place of random ones")->check(CLI::ExistingPath);
  app.add_flag("--unsynced-pass", flags.unsynced, "A pass in no_sync before each step, whose gradients stay whole on each rank");
  app.add_flag("--bf16", flags.bf16, "Compute in bfloat16");
  app.add_flag("--activation-checkpointing", flags.checkpointing);
  app.add_flag("--state-on-disk", flags.state_on_disk);
  app.add_flag("--parameters-on-disk", flags.parameters_on_disk);
  return bench::run(app, argc, argv, [&] { run(flags); });
}
