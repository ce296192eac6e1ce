// `tessera plan`: says what training takes, by dry runs of each way to shard it.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/process.h"
#include "tessera/base/words.h"
#include "tessera/cli/ckpt/places.h"
#include "tessera/cli/help.h"
#include "tessera/cli/known_words.h"
#include "tessera/cli/launch/ranks_here.h"
#include "tessera/cli/models/plan_model.h"
#include "tessera/cli/models/plan_report.h"
#include "tessera/cli/models/plan_runs.h"
#include "tessera/cli/packages.h"
#include "tessera/config/settings.h"
#include "tessera/simulate/machine.h"
#include "tessera/train/progress_line.h"

namespace tessera::cli {
namespace {

constexpr int kMostPlannedRanks = 4096;
constexpr int kNothingFits = 3;
constexpr auto kNodeShared = "node-shared";

using PlanSettings = std::map<std::string, std::string>;

struct PlanFlags {
  std::vector<std::string> words;  // a model, or a program with its arguments
  std::vector<int> worlds;
  std::vector<std::string> strategies;
  std::string precision = "fp32", checkpointing = "both", method = "full", machine, device = "cpu";
  PlannedTraining training;
  int64_t rank = 8, memory = 0;
  int ranks_per_host = 0;
  bool as_json = false;
};

class PlanCommand {
 public:
  explicit PlanCommand(PlanFlags flags) : flags_(std::move(flags)) {
    if (flags_.device == "xla") {
      throw ConfigError(
          "what XLA devices need is answered by their own compilers, for a program: tessera xla compile --topology v5p:2x2x2,wrap=1,1,1 -- "
          "{}; docs/xla.md explains it",
          is_program() ? joined(flags_.words, " ") : "llama --config " + flags_.words.front() + " --data FILE");
    }
    machine_name_ = !flags_.machine.empty() ? flags_.machine : flags_.device == "cuda" ? "gpu" : "cpu";
    machine_ = simulate::Machine::named(machine_name_);
    if (flags_.ranks_per_host == 0) flags_.ranks_per_host = machine_.ranks_per_host;
    if (flags_.memory == 0) memory_ = machine_.memory / machine_.ranks_per_host;
    if (flags_.memory > 0) memory_ = static_cast<double>(flags_.memory);
    if (is_program()) return;
    model_ = planned_model(flags_.words.front());
    auto& length = flags_.training.length;
    if (length > model_.longest)
      throw ConfigError("--length {}: the model in {} takes at most {} tokens", length, flags_.words.front(), model_.longest);
    if (length == 0) length = std::min<int64_t>(512, model_.longest);
  }

  int run() {
    std::vector<Plan> candidates;
    for (const int world : flags_.worlds) {
      for (auto& plan : plans_of(world)) candidates.push_back(std::move(plan));
    }
    auto plans = tried(std::move(candidates));
    sort_plans(plans);
    const bool fits = plans.front().fits();
    std::vector<Plan> later;  // the least plan on more ranks, if none fits
    if (!fits) later = on_more_ranks(plans);
    if (flags_.as_json) {
      print_json(plans, later);
    } else {
      print(plans, later);
    }
    return fits ? 0 : kNothingFits;
  }

 private:
  bool is_program() const { return flags_.words.size() > 1 || !names_a_model(flags_.words.front()); }

  /// The command line that trains, for people.
  std::string program() const {
    if (is_program()) return joined(flags_.words, " ");
    auto line = fmt::format("{} --model {} --data FILE --batch-size {}", model_.recipe, flags_.words.front(), flags_.training.batch_size);
    if (model_.recipe != "llama") return line;
    line += fmt::format(" --length {}", flags_.training.length);
    if (flags_.training.optimizer != "adamw") line += " --optimizer " + flags_.training.optimizer;
    return line;
  }

  /// Whether the strategy is worth a try on so many ranks. Throws ConfigError if it was asked for and is not possible.
  bool is_sensible(const std::string& strategy, int world) const {
    const bool is_asked = !flags_.strategies.empty();
    const int here = flags_.ranks_per_host;
    if (strategy == "HYBRID_SHARD") {
      if (world > here && world % here != 0) {
        if (!is_asked) return false;
        throw ConfigError("HYBRID_SHARD needs as many ranks on each host, and -n {} is no multiple of the {} ranks of a host; give -n {}, or --ranks-per-host",
                          world, here, (world / here + 1) * here);
      }
      return is_asked || world > here;
    }
    if (is_asked) return true;
    if (strategy == kNodeShared) return machine_.kind == "cpu" && world > 1;
    return strategy == "FULL_SHARD" || world > 1;
  }

  /// All ways to train on so many ranks.
  std::vector<Plan> plans_of(int world) const {
    if (is_program() && flags_.strategies.empty()) return {plan_of("as it is", world, {})};
    PlanSettings settings;
    if (flags_.precision == "bf16") settings["mixed_precision"] = "bf16";
    if (!is_program()) {
      settings["fsdp_auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP";
      settings["fsdp_transformer_layer_cls_to_wrap"] = model_.layer_class;
      if (flags_.method != "full") settings["tessera_lora_r"] = std::to_string(flags_.rank);
      if (flags_.method == "qlora") settings["tessera_quantisation"] = "nf4";
    }
    std::vector<std::string> checkpointing = {flags_.checkpointing};
    if (flags_.checkpointing == "both") checkpointing = {"no", "yes"};
    if (is_program()) checkpointing = {"no"};
    const std::vector<std::string> all = {"FULL_SHARD", kNodeShared, "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"};
    std::vector<Plan> plans;
    for (const auto& strategy : flags_.strategies.empty() ? all : flags_.strategies) {
      if (!is_sensible(strategy, world)) continue;
      settings["fsdp_sharding_strategy"] = strategy == kNodeShared ? "FULL_SHARD" : strategy;
      settings["tessera_residence"] = strategy == kNodeShared ? kNodeShared : "gathered";
      for (const auto& recomputes : checkpointing) {
        settings.erase("fsdp_activation_checkpointing");
        if (recomputes == "yes") settings["fsdp_activation_checkpointing"] = "true";
        plans.push_back(plan_of(strategy + (recomputes == "yes" ? "+ac" : ""), world, settings));
      }
    }
    return plans;
  }

  Plan plan_of(const std::string& name, int world, const PlanSettings& settings) const {
    return {.name = name,
            .world = world,
            .ranks_per_host = flags_.ranks_per_host,
            .settings = settings,
            .tokens = is_program() ? 0 : flags_.training.batch_size * flags_.training.length,
            .memory = memory_};
  }

  /// A run of each plan in a process of its own, with the settings of the plan as variables, as launch passes them.
  PlannedRun run_of(const Plan& plan) const {
    config::Settings settings;
    for (const auto& [key, value] : plan.settings) settings.set(key, value, config::Origin::Flag, "tessera plan");
    settings.expect_consistent();
    PlannedRun run{.world = plan.world, .ranks_per_host = plan.ranks_per_host, .environment = settings.environment()};
    run.environment["TESSERA_MACHINE"] = machine_name_;
    run.body = [this] { is_program() ? become(flags_.words) : model_.train(flags_.training); };
    return run;
  }

  /// Returns the plans whose dry runs took a step, with their outcomes. If none did, throws Error with what the first one said.
  std::vector<Plan> tried(std::vector<Plan> plans) {
    std::vector<PlannedRun> runs;
    for (const auto& plan : plans) runs.push_back(run_of(plan));
    const bool shows = ::isatty(STDERR_FILENO) != 0 && runs.size() > 1;
    const auto progress = [&](size_t ended) {
      if (shows) fmt::print(stderr, "\r{}", ended < runs.size() ? fmt::format("{} of {} dry runs", ended, runs.size()) : "\033[K");
    };
    // A program may write files, so only one of them runs at a time.
    const auto outcomes = planned_outcomes(runs, is_program() ? 1 : cores(), progress);
    std::vector<Plan> good;
    for (size_t i = 0; i < plans.size(); i++) {
      plans[i].outcome = outcomes[i].json;
      if (outcomes[i].fault.empty()) {
        good.push_back(std::move(plans[i]));
      } else {
        left_out_.push_back(fmt::format("{} on {} is left out: {}", plans[i].name, counted(plans[i].world, "rank"), outcomes[i].fault));
      }
    }
    if (good.empty()) throw Error("no dry run has come to an end. {}", left_out_.front());
    return good;
  }

  /// The plan that takes the least memory, on the fewest ranks on which it fits. Empty if there are none up to kMostPlannedRanks.
  std::vector<Plan> on_more_ranks(const std::vector<Plan>& plans) {
    const auto least = std::ranges::min_element(plans, {}, [](const Plan& plan) { return plan.peak(); });
    const int here = flags_.ranks_per_host;
    const auto on = [&](int hosts) {
      auto plan = *least;
      plan.world = hosts * here;
      return tried({std::move(plan)}).front();
    };
    int too_few = least->world / here, enough = too_few;
    std::vector<Plan> found;
    while (found.empty() && enough * here < kMostPlannedRanks) {
      enough = std::min(std::max(2 * enough, 1), kMostPlannedRanks / here);
      if (auto plan = on(enough); plan.fits()) {
        found = {std::move(plan)};
      } else {
        too_few = enough;
      }
      if (enough == kMostPlannedRanks / here) break;
    }
    while (!found.empty() && enough - too_few > 1) {
      const int middle = (too_few + enough) / 2;
      auto plan = on(middle);
      (plan.fits() ? enough : too_few) = middle;
      if (plan.fits()) found = {std::move(plan)};
    }
    return found;
  }

  std::string verdict(const std::vector<Plan>& plans, const std::vector<Plan>& later) const {
    if (plans.front().fits()) return {};
    const auto least = std::ranges::min_element(plans, {}, [](const Plan& plan) { return plan.peak(); });
    auto text = fmt::format("nothing fits into {} of a rank; the least is {}, {} on {}. ", train::short_bytes(memory_), train::short_bytes(least->peak()),
                            least->name, counted(least->world, "rank"));
    if (later.empty())
      return text + fmt::format("More ranks do not help, up to {}: less is needed with smaller batches or shorter rows, --activation-checkpointing yes, "
                                "--precision bf16, --optimizer adamw8bit, or --method lora or qlora",
                                kMostPlannedRanks);
    return text + fmt::format("It fits on {} or more, where it takes {}", counted(later.front().world, "rank"), train::short_bytes(later.front().peak()));
  }

  std::string machine_text() const {
    const bool is_built_in = machine_name_ == "cpu" || machine_name_ == "gpu";
    const auto memory = memory_ == 0 ? "memory unknown" : train::short_bytes(memory_) + " a rank";
    return fmt::format("machine {}: {} on each host, {}{}", machine_name_, counted(flags_.ranks_per_host, "rank"), memory,
                       is_built_in ? "; built-in round numbers, unless tessera test --calibrate FILE measures and --machine FILE names yours" : "");
  }

  void print(const std::vector<Plan>& plans, const std::vector<Plan>& later) const {
    const auto& facts = plans.front().outcome;
    fmt::print("{}: {} parameters", joined(flags_.words, " "), train::short_number(facts.at("parameters").get<double>()));
    if (!is_program())
      fmt::print(", {}, {} of {} tokens a rank and step", flags_.method, counted(flags_.training.batch_size, "row"), flags_.training.length);
    fmt::print("\n{}\n\n{}\n", machine_text(), plan_tables(plans));
    const ChartStyle style{.columns = train::Display::of(stdout).columns().value_or(80),
                           .glyphs = train::glyphs_of_locale(),
                           .colours = Help::has_colour(STDOUT_FILENO) ? ChartStyle::Colours::Yes : ChartStyle::Colours::No};
    if (const auto chart = plan_chart(plans, style); !chart.empty()) fmt::print("{}\n", chart);
    if (std::ranges::any_of(plans, [](const Plan& plan) { return plan.name.ends_with("+ac"); })) fmt::print("+ac is with activation checkpointing\n");
    for (const auto& line : left_out_) fmt::print("{}\n", line);
    if (plans.front().fits()) fmt::print("{}", plan_advice(plans.front(), program()));
    std::fflush(stdout);
    if (const auto words = verdict(plans, later); !words.empty()) fmt::print(stderr, "tessera: {}\n", words);
  }

  void print_json(const std::vector<Plan>& plans, const std::vector<Plan>& later) const {
    nlohmann::ordered_json json = {{"machine", machine_name_}, {"memory", memory_}, {"plans", nlohmann::ordered_json::array()}, {"left_out", left_out_}};
    for (const auto& plan : plans) json["plans"].push_back(json_of(plan));
    if (plans.front().fits()) json["command"] = launch_line(plans.front(), program());
    if (const auto words = verdict(plans, later); !words.empty()) json["verdict"] = words;
    if (!later.empty()) json["fits_on"] = later.front().world;
    fmt::print("{}\n", json.dump(2));
  }

  PlanFlags flags_;
  std::string machine_name_;
  simulate::Machine machine_;
  double memory_ = 0;  // of a rank; 0 if unknown
  PlannedModel model_;
  std::vector<std::string> left_out_;
};

void add_plan(CLI::App& app, std::function<int()>& chosen) {
  auto* command = app.add_subcommand("plan", "Says what memory and time training takes, before it runs, and how best to shard it");
  const auto flags = std::make_shared<PlanFlags>();
  auto& training = flags->training;
  command
      ->add_option("MODEL", flags->words,
                   "A Hugging Face folder, its config.json, a .safetensors file beside one, or a GGUF file, whose weights are not read; or, after --, "
                   "a program that trains, with its arguments")
      ->required()
      ->expected(1, 1 << 20);
  command->add_option("-n,--ranks", flags->worlds, "How many ranks there are in all; may be repeated")
      ->type_name("N")
      ->required()
      ->allow_extra_args(false)
      ->check(from_to(1, kMostPlannedRanks));
  command->add_option("--ranks-per-host", flags->ranks_per_host, "How many of them are on a host; as many as on the machine's unless given")
      ->check(from_to(1, kMostPlannedRanks));
  command
      ->add_option("--strategy", flags->strategies,
                   "How to shard; may be repeated. All that make sense unless given, and a program as it is; a program with a Trainer follows")
      ->allow_extra_args(false)
      ->check(one_of({"FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD", kNodeShared}));
  command->add_option("--precision", flags->precision, "In which dtype to compute")->capture_default_str()->check(one_of({"fp32", "bf16"}));
  command->add_option("--batch-size", training.batch_size, "Rows of a rank and step")->capture_default_str()->check(from_to(1, 1'000'000));
  command->add_option("--length", training.length, "Tokens in a row; 512, or as many as the model takes, unless given")->check(from_to(2, 10'000'000));
  command->add_option("--activation-checkpointing", flags->checkpointing, "Whether layers run again in backward")
      ->capture_default_str()
      ->check(one_of({"yes", "no", "both"}));
  command->add_option("--method", flags->method, "full: all weights train; lora: adapters train; qlora: beside quantised weights")
      ->capture_default_str()
      ->check(one_of({"full", "lora", "qlora"}));
  command->add_option("--rank", flags->rank, "Rank of adapters")->capture_default_str()->check(from_to(1, 100'000));
  command->add_option("--optimizer", training.optimizer, "adamw8bit keeps its moments in eight bits")
      ->capture_default_str()
      ->check(one_of({"adamw", "adamw8bit"}));
  command->add_flag_callback(
      "--step-in-backward", [&training] { training.step = PlannedTraining::Step::InBackward; },
      "The optimizer steps in backward, unit by unit");
  command->add_option("--device", flags->device, "Where to train")->capture_default_str()->check(one_of({"cpu", "cuda", "xla"}));
  command->add_option("--machine", flags->machine, "The file of tessera test --calibrate, or cpu or gpu for built-in numbers; as --device says unless given")
      ->type_name("FILE");
  add_value(*command, "--memory", flags->memory, bytes_of, "What a rank may use, such as 64GB; its part of the machine's unless given")->type_name("SIZE");
  command->add_flag("--json", flags->as_json, "As JSON");
  command->footer(Help::footer_of(
      {"tessera plan SmolLM2-135M -n 2 -n 8", "tessera plan Llama-3.1-8B -n 64 --precision bf16 --memory 80GB --device cuda",
       "tessera plan -n 64 -- ./train --layers 32"},
      "The status is 3 if nothing fits. docs/planning.md explains the tables."));
  command->callback([&chosen, flags] {
    chosen = [flags] { return PlanCommand(*flags).run(); };
  });
}

const AddedCommand plan_command("plan", add_plan);

}  // namespace
}  // namespace tessera::cli
