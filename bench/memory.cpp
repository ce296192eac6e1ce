// Trains a GPT by one technique, and says what it takes of memory: by formula, by kind, and as the kernel counts it. bench/memory runs it for a
// table of techniques.
#include <fmt/format.h>
#include <tessera/models/gpt.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <chrono>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

namespace {

using namespace tessera;
using Clock = std::chrono::steady_clock;

struct Flags {
  int64_t width = 2048, layers = 19, length = 128;
  int steps = 2;
  std::string strategy = "FULL_SHARD", weights;
  bool bf16 = false, checkpointing = false, state_on_disk = false, parameters_on_disk = false;
};

/// What this process takes, its part of what it shares with others counted.
double own_megabytes() {
  std::ifstream file("/proc/self/smaps_rollup");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("Pss:")) return std::stod(line.substr(4)) * 1024 / 1e6;
  }
  return 0;
}

double over_ranks(const Communicator& world, double value, Reduce op) {
  const auto all = torch::full({1}, value, torch::kDouble);
  world.all_reduce(all, {.op = op}).wait();
  return all.item<double>();
}

/// The most that this rank has taken since it was made.
class Peak {
 public:
  Peak()
      : watch_([this] {
          while (!ends_) {
            most_ = std::max(most_.load(), own_megabytes());
            std::this_thread::sleep_for(std::chrono::milliseconds(100));
          }
        }) {}
  Peak(const Peak&) = delete;
  Peak& operator=(const Peak&) = delete;
  ~Peak() {
    ends_ = true;
    watch_.join();
  }
  double megabytes() const { return most_; }

 private:
  std::atomic<bool> ends_ = false;
  std::atomic<double> most_ = 0;
  std::thread watch_;
};

class Training {
 public:
  Training(const Flags& flags, const Communicator& world)
      : flags_(flags), world_(world), model_(make_model()), optimizer_(parameters(*model_), {.lr = 1e-4, .momentum = 0.9}) {
    if (flags_.state_on_disk) optimizer_.offload_state(OffloadTo::Disk, {.folder = "."});
  }

  double step() {
    const auto ids = torch::randint(options().vocabulary, {1, flags_.length + 1}, torch::kLong);
    auto x = model_->tokens(ids.slice(1, 0, -1)) + model_->positions(torch::arange(flags_.length));
    for (const auto& each : *model_->blocks) {
      const auto block = std::static_pointer_cast<models::GptBlockImpl>(each);
      x = flags_.checkpointing ? activation::checkpoint(block, x) : block->forward(x);
    }
    const auto scores = model_->head(model_->norm(x)).to(torch::kFloat);
    const auto loss = torch::cross_entropy_loss(scores.flatten(0, 1), ids.slice(1, 1).flatten());
    loss.backward();
    optimizer_.step();
    optimizer_.zero_grad();
    return loss.item<double>();
  }

  models::Gpt& model() { return model_; }

 private:
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

int run(const Flags& flags) {
  const auto world = init();
  {
    // What libraries and thread pools take is there from now on, and does not count.
    Flags small = flags;
    small.width = 128, small.layers = 1, small.weights.clear();
    Training(small, world).step();
  }
  const auto before = own_megabytes();
  auto most = before;
  const auto begin = Clock::now();
  std::optional<Training> training;
  {
    const Peak peak;
    training.emplace(flags, world);
    most = peak.megabytes();
  }
  const auto seconds_to_build = std::chrono::duration<double>(Clock::now() - begin).count();
  const auto peak_of_building = over_ranks(world, most - before, Reduce::Sum);
  training->step();  // makes the optimizer's state
  world.barrier();
  const auto timed = Clock::now();
  double loss = 0;
  for (int step = 0; step < flags.steps; step++) loss = training->step();
  world.barrier();
  const auto seconds = std::chrono::duration<double>(Clock::now() - timed).count() / flags.steps;
  {
    const Peak peak;
    training->step();
    most = peak.megabytes();
  }
  const auto peak_of_step = over_ranks(world, most - before, Reduce::Sum);
  int64_t numel = 0;
  for (const auto& [name, shard] : named_parameters(*training->model())) numel += shard_info(shard)->numel;
  const auto all = over_ranks(world, static_cast<double>(numel), Reduce::Sum) * 4 / 1e6;  // of all ranks, in MB
  const auto unsharded = over_ranks(world, static_cast<double>(counters(*training->model()).peak_unsharded_bytes) / 1e6, Reduce::Sum);
  if (world.rank() != 0) return 0;
  const nlohmann::json row = {{"world", world.size()},
                              {"shards_mb", all},
                              {"gradients_mb", all},
                              {"state_mb", all},
                              {"unsharded_mb", unsharded},
                              {"measured_mb", peak_of_step},
                              {"building_mb", peak_of_building},
                              {"building_s", seconds_to_build},
                              {"step_s", seconds},
                              {"loss", loss}};
  fmt::print("{}\n", row.dump());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Trains a GPT by one technique on the ranks that tessera launch has started, and prints what it takes of memory.", "bench_memory");
  Flags flags;
  app.add_option("--width", flags.width)->check(CLI::Range(128, 100'000))->capture_default_str();
  app.add_option("--layers", flags.layers)->check(CLI::Range(1, 10'000))->capture_default_str();
  app.add_option("--length", flags.length, "Tokens in a step")->check(CLI::Range(1, 100'000))->capture_default_str();
  app.add_option("--steps", flags.steps)->check(CLI::Range(1, 1000))->capture_default_str();
  app.add_option("--strategy", flags.strategy)->check(CLI::IsMember({"NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD"}))->capture_default_str();
  app.add_option("--weights", flags.weights, "A file of weights to load in place of random ones")->check(CLI::ExistingPath);
  app.add_flag("--bf16", flags.bf16, "Compute in bfloat16");
  app.add_flag("--activation-checkpointing", flags.checkpointing);
  app.add_flag("--state-on-disk", flags.state_on_disk);
  app.add_flag("--parameters-on-disk", flags.parameters_on_disk);
  CLI11_PARSE(app, argc, argv);
  try {
    return run(flags);
  } catch (const std::exception& error) {
    fmt::print(stderr, "bench_memory: {}\n", error.what());
    return 1;
  }
}
