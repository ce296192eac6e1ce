// Trainer: prepares models, optimizers and loaders as the configuration says, for a training loop that the program writes itself.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <array>
#include <concepts>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <ranges>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "tessera/base/module_ref.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/notes.h"
#include "tessera/checkpoint/state_dict.h"
#include "tessera/comm/communicator.h"
#include "tessera/config/settings.h"
#include "tessera/data/loader.h"
#include "tessera/optim/any_optimizer.h"
#include "tessera/optim/grad_scaler.h"
#include "tessera/optim/learning_rate.h"
#include "tessera/optim/optimizer.h"
#include "tessera/shard/deferred_init.h"
#include "tessera/shard/options.h"
#include "tessera/shard/reduction.h"
#include "tessera/train/evaluation.h"
#include "tessera/train/profile.h"
#include "tessera/train/reporter.h"
#include "tessera/train/reporters.h"

namespace torch::optim {
class LRScheduler;
}

namespace tessera {

struct TrainerOptions {
  std::optional<Communicator> world = {};            // init() unless given
  std::map<std::string, std::string> settings = {};  // configuration keys such as {"mixed_precision", "bf16"}; they win over other sources
  std::map<std::string, std::string> defaults = {};  // values for keys that no other source sets
  /// The configuration file; TESSERA_CONFIG_FILE unless given. Settings that launch passes on win over it.
  std::filesystem::path config_file = {};
  std::function<void(ShardOptions& options)> adjust_sharding = {};  // changes the options that the settings give, for each model
  /// Where log() writes: FILE.jsonl for lines of JSON, FOLDER/ for TensorBoard, mlflow:FOLDER, prometheus:PORT. tessera_log_with adds to
  /// it, and so does `tessera launch --record`.
  std::vector<std::string> log_with = {};
};

struct SeedOptions {
  bool device_specific = false;  // each rank takes the seed plus its number
  bool deterministic = false;    // operators of libtorch whose results may differ from run to run are errors
};

struct PadOptions {
  int64_t dim = 0;
  double pad_index = 0;    // the value to fill with
  bool pad_first = false;  // pads at the beginning, not at the end
};

struct SaveModelOptions {
  int64_t max_shard_size = 5'000'000'000;  // bytes in a file
};

/// Everything that is prepared must live until the Trainer is destroyed or free_memory() is called. All ranks call the same functions in the
/// same order.
class Trainer {
 public:
  explicit Trainer(TrainerOptions options = {});
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;
  ~Trainer();

  const Communicator& world() const { return world_; }
  const config::Settings& settings() const { return settings_; }
  int process_index() const { return world_.local_ranks().front(); }
  int num_processes() const { return world_.size(); }
  /// The number of this rank among those of its host.
  int local_process_index() const;
  bool is_main_process() const { return world_.is_first(); }
  bool is_local_main_process() const { return local_process_index() == 0; }
  bool is_last_process() const { return world_.local_ranks().back() == world_.size() - 1; }
  void wait_for_everyone() const { world_.barrier({.unit = "wait_for_everyone"}); }
  /// Prints a line on rank 0.
  void print(std::string_view line) const;
  /// Seeds the generators of libtorch, as Accelerate does.
  void set_seed(uint64_t seed, const SeedOptions& options = {}) const;

  /// Calls `act` on rank 0, then on the others, and returns its result: for work such as a download, which rank 0 does and the others find
  /// done. If rank 0 fails, all ranks get the error, and the others do not call `act`. The others wait for as long as an operation may take
  /// (InitOptions::operation_limit). `act` must not be collective itself. Collective.
  template <class Act>
  auto main_process_first(Act&& act) const {
    return call_in_turn(is_main_process(), act);
  }
  /// Like main_process_first(), but with the first rank of each host, for folders that hosts do not share.
  template <class Act>
  auto local_main_process_first(Act&& act) const {
    return call_in_turn(is_local_main_process(), act);
  }

  /// Lets any rank signal all ranks, for example to stop early: once any rank has called set_trigger(), the next check_trigger() is true on
  /// all ranks.
  void set_trigger() { triggered_ = true; }
  bool check_trigger();  // collective

  /// Calls `construct` and returns the module that it makes. With fsdp_cpu_ram_efficient_loading only rank 0 makes the values of parameters,
  /// and prepare() sends them to the others.
  template <class Construct>
  auto make_model(Construct&& construct) const {
    return needs_values() ? std::forward<Construct>(construct)() : deferred_init(std::forward<Construct>(construct));
  }
  /// Whether this rank has to load weights before prepare().
  bool needs_values() const;

  /// Prepares the arguments in order. Shards models. In optimizers of torch that were made before, replaces the parameters with the shards.
  /// A learning rate or a scheduler of torch belongs to the optimizer before it. An average is saved with the model before it, and the
  /// program updates it. Prepared loaders put their batches on the device of the ranks, are saved with the run, and end an accumulation when
  /// an epoch ends. With several models, an optimizer comes after its model. Collective.
  template <class... Things>
  void prepare(Things&&... things) {
    (prepare_one(things), ...);
  }

  /// Covers one batch: as long as it lives, backward passes reduce gradients only if this batch ends a step. A step ends after
  /// gradient_accumulation_steps batches, and at the end of an epoch of the present loader (see backward).
  class [[nodiscard]] Accumulation {
   public:
    Accumulation(const Accumulation&) = delete;
    ~Accumulation() { trainer_.in_batch_ = false; }

   private:
    friend class Trainer;
    Accumulation(Trainer& trainer, std::vector<NoSync> held) : trainer_(trainer), held_(std::move(held)) { trainer_.in_batch_ = true; }
    Trainer& trainer_;
    std::vector<NoSync> held_;
  };
  Accumulation accumulate();
  /// Whether the present batch ends a step.
  bool sync_gradients() const { return syncs_; }

  /// Calls loss.backward() with the loss divided by the number of batches of a step, multiplied by the weight of the present batch
  /// (Samples::weight), and scaled if gradients are in float16. The present batch is the last one that the present loader has returned. The
  /// present loader is the prepared one of the innermost open loop or, outside of loops, the prepared one from which a batch was taken last.
  /// Throws UsageError if a step has several batches and accumulate() was not called for this batch, or if the loss might also belong to a
  /// batch of another loader with another weight.
  void backward(const at::Tensor& loss);
  /// Like backward(loss), but for the loss of `batch`, even if other batches were taken since. With an empty batch (`{}`), the loss is not
  /// weighted.
  void backward(const at::Tensor& loss, const data::Samples& batch) { backward_weighted(loss, batch.weight); }
  /// The norm of all gradients of the prepared optimizers; undefined if this batch ends no step. Collective.
  at::Tensor grad_norm(double p = 2);
  /// Limits the norm of all gradients of the prepared optimizers, and returns the norm before limiting; undefined if this batch ends no
  /// step. If the settings have another limit, `max_norm` holds, and a warning says so. Collective.
  at::Tensor clip_grad_norm(double max_norm, double p = 2);
  /// Limits each value of the gradients of the prepared optimizers. Does nothing if this batch ends no step.
  void clip_grad_value(double clip_value);
  /// Does nothing unless this batch ends a step. Limits the norm to gradient_clipping, unless clip_grad_norm was called; sets the learning
  /// rate; steps each prepared optimizer, or only the given one, and its scheduler of torch; and drops the gradients. Returns whether the
  /// parameters have changed: they have not if gradients in float16 overflowed. The scale of such gradients changes when no prepared
  /// optimizer has gradients left. Collective.
  bool step();
  bool step(optim::Optimizer& optimizer) { return step_some(optim::AnyOptimizer(&optimizer)); }
  bool step(torch::optim::Optimizer& optimizer) { return step_some(optim::AnyOptimizer(&optimizer)); }
  /// The steps of the first optimizer so far, including those before the run was resumed.
  int64_t steps() const;
  /// The learning rate of the first optimizer's first parameter group, as of the last step.
  double lr() const;

  /// Whether the folder has a state for load_state: an empty folder has none. First repairs a save that a killed process left half done.
  /// Throws UsageError for a file. Collective.
  bool has_state(const std::filesystem::path& folder) const;
  /// Saves all that was prepared and registered, and the states of random generators: as a checkpoint of Tessera, or in a layout of Accelerate
  /// if tessera_checkpoint_format or fsdp_state_dict_type asks for it. Saves several models in folders model_0, model_1 and so on. Replaces
  /// an earlier save once the new one is complete, also through a symbolic link. Throws UsageError in the middle of an accumulation, whose gradients
  /// would be lost. Collective.
  void save_state(const std::filesystem::path& folder);
  /// The contents that save_state saves, for checkpoint::save or an AsyncSaver; load_state loads their checkpoints, too. Throws UsageError in
  /// the same cases as save_state, and if several models are prepared.
  checkpoint::Contents contents() const;
  /// Loads a state that save_state or Accelerate has saved, on any number of ranks. If the global batch size changed, converts the number
  /// of steps to batches of the new size, so that a schedule of learning rates still ends when the data does. lr() then returns the rate of
  /// the last step. Warns about Accelerate state that is not restored. If anything does not fit, throws and changes nothing, except that
  /// if there are several models, those before the error stay loaded. Collective.
  void load_state(const std::filesystem::path& folder);
  /// Makes checkpoints refer to a base model for all that is frozen: from now on save_state leaves the frozen values out, and load_state
  /// expects the model to have the same frozen values. Collective.
  void refer_to_base(const std::string& name);
  /// Makes save_state and load_state save and load an object, too: any value with save() and a static load(text).
  template <checkpoint::Savable T>
  void register_for_checkpointing(T& object) {
    registered_.push_back(
        {.save = [&object] { return std::string(object.save()); }, .load = [&object](const std::string& text) { object = T::load(text); }});
  }

  /// The whole state dict on rank 0, and an empty one on the other ranks. Collective.
  checkpoint::StateDict get_state_dict(ConstModuleRef model) const;
  /// Writes the model to FOLDER/model.safetensors, or to several files with an index, as Hugging Face's programs read it. Each rank writes
  /// its part, so all ranks must see the same files. Of a model with adapters, writes only the adapters, as Python's peft reads them.
  /// Collective.
  void save_model(ModuleRef model, const std::filesystem::path& folder, const SaveModelOptions& options = {}) const;

  /// Concatenates the tensors of all ranks along dimension 0, in rank order; numbers become a vector. Shapes must be equal. Collective.
  at::Tensor gather(const at::Tensor& tensor) const;
  /// The rows of all ranks, in rank order, without those that only fill the batch. A batch has a row for each of its samples; without
  /// samples (`{}`), ranks may have any number of rows. Collective.
  at::Tensor gather_for_metrics(const at::Tensor& rows, const data::Samples& batch) const { return gather_rows({&rows, 1}, batch).front(); }
  /// The same for several tensors: const auto [answers, labels] = trainer.gather_for_metrics({scores.argmax(1), batch.targets}, batch);
  template <size_t N>
  std::array<at::Tensor, N> gather_for_metrics(const at::Tensor (&rows)[N], const data::Samples& batch) const {
    std::array<at::Tensor, N> all;
    std::ranges::move(gather_rows(rows, batch), all.begin());
    return all;
  }
  /// Pads the tensor to the length that it has on the rank with the longest. Collective.
  at::Tensor pad_across_processes(const at::Tensor& tensor, const PadOptions& options = {}) const;
  /// A new tensor with the sum over all ranks, or the mean, the least or the greatest. Collective.
  at::Tensor reduce(const at::Tensor& tensor, Reduce reduction = Reduce::Sum) const;
  /// This rank's part of rows that every rank has: parts differ in length by one at most, and the first ranks have the longer ones.
  at::Tensor split_between_processes(const at::Tensor& rows) const;
  template <std::ranges::contiguous_range Range>
  auto split_between_processes(Range& all) const {
    const auto [first, count] = own_part(static_cast<int64_t>(std::ranges::size(all)));
    return std::span(all).subspan(static_cast<size_t>(first), static_cast<size_t>(count));
  }

  /// Writes, on rank 0, the values of a step, which is steps() unless given, to the files of TrainerOptions::log_with and to the trackers
  /// that were added. `step` may also be a count of the program's own, such as epochs, for some of the values. After load_state, files drop
  /// the reports that the run writes again: all reports from the next step on and, if the first log() has a count of the program's own, the
  /// values of its names from that count on.
  void log(const train::Values& values, std::optional<int64_t> step = {});
  /// Adds a reporter of the program's own, to which log() also writes.
  void add_tracker(std::unique_ptr<train::Reporter> tracker) { trackers_.push_back(std::move(tracker)); }
  /// Records what this rank does until the result is destroyed, and writes it to FOLDER/profile_RANK.json: const auto profile =
  /// trainer.profile();
  train::Profile profile(const train::ProfileOptions& options = {}) const { return {options, world_.record()}; }

  /// Forgets everything that was prepared and registered, so that it may be destroyed and other objects may be prepared.
  void free_memory();
  /// Closes the files of log(), and waits for all ranks. Collective.
  void end_training();
  /// Whether prepare() was given this loader.
  bool has_prepared(const data::Loader& loader) const { return std::ranges::find(loaders_, &loader) != loaders_.end(); }
  /// How many steps an epoch of the loader has, with gradient_accumulation_steps.
  int64_t steps_of_epoch(data::Loader& loader) const;
  /// A sampler, or a stream, for these ranks.
  data::Sampler make_sampler(data::SamplerOptions options) const;
  data::Stream make_stream(data::StreamOptions options) const;
  /// Iterates over all batches of a loader, on the device of the ranks, with the model in eval mode and without gradients: for (auto& batch :
  /// trainer.evaluation(model, loader)). The model may be any module. Shows its progress. Collective.
  train::Evaluation evaluation(ModuleRef model, data::Loader& loader) const {
    return {model, has_prepared(loader) ? loader : placed(loader), world_};
  }
  /// Skips so many batches of a loader, without fetching them.
  static void skip_first_batches(data::Loader& loader, int64_t batches);
  /// Returns the module that the program made. prepare() does not wrap modules, so this only unwraps FullyShardedDataParallel.
  template <class M>
  static const auto& unwrap(const M& model) {
    if constexpr (requires { model.module(); }) {
      return model.module();
    } else {
      return model;
    }
  }

 private:
  struct Model {
    std::shared_ptr<torch::nn::Module> module;
    std::vector<size_t> optimizers = {};            // the indices of the model's optimizers in optimizers_
    std::optional<checkpoint::Base> base = {};      // the base model that checkpoints refer to
    optim::Average* average = nullptr;
  };
  struct Prepared {
    optim::AnyOptimizer optimizer;
    std::optional<optim::LearningRate> rate = {};
    torch::optim::LRScheduler* scheduler = nullptr;
    std::vector<double> first_rates = {};                      // the first learning rates of torch's parameter groups
    int64_t steps = 0, scheduled = 0;                          // steps of the optimizer, and of its scheduler in this process
    bool averaged = false, clipped = false, unscaled = false;  // what was done with the present gradients
    bool stepped = false;                                      // whether it has stepped since update_scale() last changed the scale
  };
  struct Registered {
    std::function<std::string()> save;
    std::function<void(const std::string&)> load;
  };

  void prepare_one(const std::shared_ptr<torch::nn::Module>& model);
  void prepare_one(optim::Optimizer& optimizer);
  void prepare_one(torch::optim::Optimizer& optimizer);
  void prepare_one(const optim::LearningRate& rate);
  void prepare_one(torch::optim::LRScheduler& scheduler);
  void prepare_one(optim::Average& average);
  void prepare_one(data::Loader& loader);
  template <class M>
    requires requires(const M& holder) { std::shared_ptr<torch::nn::Module>(holder.ptr()); }
  void prepare_one(const M& holder) {
    prepare_one(std::shared_ptr<torch::nn::Module>(holder.ptr()));
  }

  data::Loader& placed(data::Loader& loader) const;
  /// The present loader, followed by other loaders to whose batch the loss may belong.
  std::vector<data::Loader*> current_loaders() const;
  double present_weight() const;
  void backward_weighted(const at::Tensor& loss, double weight);
  /// Calls `act` on the ranks that pass `first`, while the others wait. Collective.
  void call_first(bool first, const std::function<void()>& act) const;
  template <class Act>
  auto call_in_turn(bool first, Act& act) const {
    if constexpr (std::is_void_v<std::invoke_result_t<Act&>>) {
      call_first(first, [&] { act(); });
      if (!first) act();
    } else {
      std::optional<std::decay_t<std::invoke_result_t<Act&>>> result;
      call_first(first, [&] { result.emplace(act()); });
      if (!first) result.emplace(act());
      return *std::move(result);
    }
  }
  std::vector<at::Tensor> gather_rows(std::span<const at::Tensor> rows, const data::Samples& batch) const;
  /// Where this rank's part of `length` begins, and how long it is.
  std::pair<int64_t, int64_t> own_part(int64_t length) const;
  void warn_of_other_limit(double max_norm);

  void expect_new(optim::AnyOptimizer optimizer) const;
  void add(Prepared prepared);
  Prepared& without_rate();
  static std::vector<at::Tensor> parameters_of(const Prepared& optimizer) { return optim::parameters_of(optimizer.optimizer); }
  void expect_one_scale(const Prepared& optimizer) const;
  void average(Prepared& optimizer) const;
  void unscale(Prepared& optimizer);
  std::vector<at::Tensor> unscaled_parameters();
  optim::Optimizer* only_optimizer() const;
  void update_scale();
  void take_rate(Prepared& optimizer) const;
  static void follow_steps(Prepared& optimizer);
  bool has_no_part(const Prepared& optimizer) const;
  bool take_step(Prepared& optimizer);
  /// Steps all optimizers unless one is given.
  bool step_some(std::optional<optim::AnyOptimizer> optimizer);
  void expect_between_steps(std::string_view function) const;
  checkpoint::Contents contents_of(size_t model) const;
  checkpoint::Notes notes_of(size_t model) const;
  /// The contents of notes, which load_state reads before it changes anything.
  struct Resumed {
    std::vector<int64_t> steps = {};
    std::vector<std::optional<data::Position>> positions = {};
    std::vector<std::string> states = {};
    std::optional<optim::GradScaler> scaler = {};
  };
  Resumed read_notes(size_t model, const checkpoint::Notes& notes, const std::filesystem::path& folder) const;
  void resume(size_t model, Resumed resumed);
  void save_model(size_t model, const std::filesystem::path& folder, checkpoint::Notes notes);

  const TrainerOptions options_;
  config::Settings settings_;
  const Communicator world_;
  optim::GradScaler scaler_;
  const std::vector<std::string> reports_;  // where log() writes
  std::vector<Model> models_;
  std::vector<Prepared> optimizers_;
  std::vector<data::Loader*> loaders_;
  std::vector<Registered> registered_;
  std::vector<std::unique_ptr<train::Reporter>> trackers_;
  std::optional<train::Reporters> log_;  // made when something is logged
  int64_t log_from_ = 1;                 // the first step that was not logged yet
  bool resumed_ = false;                 // whether nothing was logged since load_state
  int64_t batches_ = 0;                  // batches since the last step
  uint64_t used_ = 0;                    // data::Loader::newest() when backward was called last
  bool syncs_ = true, in_batch_ = false, triggered_ = false, warned_of_limit_ = false;
};

}  // namespace tessera
