// `tessera plan`: says what training takes, by dry runs of each way to shard it.
#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <tuple>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/fd.h"
#include "tessera/base/folder.h"
#include "tessera/base/input_file.h"
#include "tessera/base/process.h"
#include "tessera/base/run_folder.h"
#include "tessera/base/table.h"
#include "tessera/base/words.h"
#include "tessera/cli/ckpt/places.h"
#include "tessera/cli/help.h"
#include "tessera/cli/known_words.h"
#include "tessera/cli/launch/ranks_here.h"
#include "tessera/cli/launch/watchdog.h"
#include "tessera/cli/models/plan_model.h"
#include "tessera/cli/packages.h"
#include "tessera/comm/simulation.h"
#include "tessera/config/settings.h"
#include "tessera/simulate/machine.h"
#include "tessera/train/progress_line.h"

namespace tessera::cli {
namespace {

constexpr int kMostPlannedRanks = 4096;
constexpr int kNothingFits = 3;
constexpr std::chrono::minutes kLimitOfDryRun(10);
constexpr int64_t kLeastMemory = 1'000'000;
constexpr auto kTokenizer = "tokenizer.json";
constexpr int kLinesOfFailed = 10;  // of what a program says whose dry run has failed
constexpr auto kNodeShared = "node-shared", kAsItIs = "as it is";

struct PlanFlags {
  std::vector<std::string> words;  // a model, or a program with its arguments
  std::vector<int> worlds;
  std::vector<std::string> strategies;
  std::string precision = "fp32", method = "full", machine = "cpu";
  int64_t batch_size = 4, length = 0, rank = 8, memory = 0;
  int ranks_per_host = 0;
  bool as_json = false;

  /// Leaves out what was given twice.
  void make_unique() {
    const auto keep_first = [](auto& all) {
      for (auto each = all.begin(); each != all.end();) each = std::find(all.begin(), each, *each) != each ? all.erase(each) : each + 1;
    };
    keep_first(worlds);
    keep_first(strategies);
  }
  bool are_of_program() const { return words.size() > 1 || !names_a_model(words.front()); }
  /// Throws ConfigError for a flag that would have no effect.
  void expect_use(const CLI::App& command) const {
    for (const auto* name : {"--batch-size", "--length", "--method", "--rank"}) {
      if (are_of_program() && command.count(name) > 0)
        throw ConfigError("{} is for a model from its description; a program is planned with its own flags, which come after it", name);
    }
    if (method == "full" && command.count("--rank") > 0)
      throw ConfigError("--rank is for adapters, which --method full does not make; give --method lora or qlora");
  }
};

/// A way to train, and the outcome of its dry run.
struct Plan {
  std::string name;  // "FULL_SHARD+ac"
  int world;
  std::map<std::string, std::string> settings = {};  // keys of a configuration that differ from the defaults
  nlohmann::ordered_json outcome = {};

  double peak() const { return outcome.at("memory").at("peak"); }
  double kind(std::string_view name) const { return outcome.at("memory").at("kinds").value(name, 0.0); }
  double time(const char* what) const { return outcome.at("time").at(what); }
  std::string time_text(const char* what) const { return duration_text(time(what)); }
};

class PlanCommand {
 public:
  explicit PlanCommand(PlanFlags flags) : flags_(std::move(flags)), machine_(simulate::Machine::named(flags_.machine)) {
    flags_.make_unique();
    here_ = flags_.ranks_per_host > 0 ? flags_.ranks_per_host : machine_.ranks_per_host;
    for (const int world : flags_.worlds) {
      if (world > here_ && world % here_ != 0)
        throw ConfigError("-n {}: hosts of {} would not all have as many; give a multiple of {}, or --ranks-per-host", world,
                          counted(here_, "rank"), here_);
    }
    if (is_program_) return;
    model_ = planned_model(flags_.words.front());
    auto& length = flags_.length;
    if (length > model_.longest)
      throw ConfigError("--length {}: the model in {} takes at most {} tokens", length, flags_.words.front(), model_.longest);
    if (length == 0) length = std::min<int64_t>(512, model_.longest);
  }

  int run() {
    if (!is_program_ && env("TESSERA_DRY_RUN")) {
      model_.train(flags_.batch_size, flags_.length);
      return 0;
    }
    for (const int world : flags_.worlds) add_plans(world);
    try_all();
    std::ranges::stable_sort(plans_, {}, [&](const Plan& plan) { return std::tuple(!fits(plan), plan.time("step") / plan.world); });
    flags_.as_json ? print_json() : print();
    return fits(plans_.front()) ? 0 : kNothingFits;
  }

 private:
  /// The memory that a rank may use; 0 if unknown. A rank has one GPU at most, even on a host with fewer ranks than GPUs.
  double memory_of(int world) const {
    if (flags_.memory > 0) return static_cast<double>(flags_.memory);
    return machine_.memory / (machine_.kind == "gpu" ? std::max(here_, machine_.ranks_per_host) : std::min(here_, world));
  }
  std::string memory_text() const {
    if (memory_of(here_) == 0) return ", unknown memory each";
    if (flags_.memory > 0 || machine_.kind == "gpu") return fmt::format(", {} each", size_text(memory_of(here_)));
    return fmt::format(", which share {} equally", size_text(machine_.memory));
  }
  bool fits(const Plan& plan) const { return memory_of(plan.world) == 0 || plan.peak() <= memory_of(plan.world); }
  double tokens_per_second(const Plan& plan) const {
    return static_cast<double>(flags_.batch_size * flags_.length) * plan.world / plan.time("step");
  }

  /// Adds all ways to train on so many ranks.
  void add_plans(int world) {
    auto strategies = flags_.strategies;
    if (strategies.empty() && is_program_) {
      strategies = {kAsItIs};
    } else if (strategies.empty()) {
      strategies = {"FULL_SHARD"};
      if (world > 1 && machine_.kind == "cpu") strategies.emplace_back(kNodeShared);
      if (world > 1) strategies.insert(strategies.end(), {"SHARD_GRAD_OP", "NO_SHARD"});
      if (world > here_) strategies.emplace_back("HYBRID_SHARD");
    }
    for (const auto& strategy : strategies) {
      const bool is_shared = strategy == kNodeShared;
      Plan plan{.name = strategy, .world = world};
      if (strategy != kAsItIs) {
        plan.settings["fsdp_sharding_strategy"] = is_shared ? "FULL_SHARD" : strategy;
        plan.settings["tessera_residence"] = is_shared ? kNodeShared : "gathered";
      }
      if (flags_.precision == "bf16") plan.settings["mixed_precision"] = "bf16";
      if (!is_program_) {
        plan.settings["fsdp_auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP";
        plan.settings["fsdp_transformer_layer_cls_to_wrap"] = model_.layer_class;
        if (flags_.method != "full") plan.settings["tessera_lora_r"] = std::to_string(flags_.rank);
        if (flags_.method == "qlora") plan.settings["tessera_quantisation"] = "nf4";
      }
      plans_.push_back(plan);
      if (is_program_) continue;
      plan.name += "+ac";
      plan.settings["fsdp_activation_checkpointing"] = "true";
      plans_.push_back(plan);
    }
  }

  /// Starts the program, or this one, which then trains the model.
  Process started(const std::vector<std::string>& command, const std::map<std::string, std::string>& environment,
                  const std::function<void()>& prepare) const {
    try {
      return Process(command, environment, Process::Output::Inherit, prepare);
    } catch (const IoError& error) {
      const auto& first = flags_.words.front();
      if (!is_program_) throw;
      if (names_a_model(first))
        throw ConfigError("{} is a model, so '{}' belongs to no flag: give one MODEL, or a program with its arguments after --", first,
                          flags_.words[1]);
      throw ConfigError("{} is not a model, which is a folder, or a .json, .safetensors or .gguf file; and as a program: {}", first,
                        error.what());
    }
  }

  /// Runs a plan in a process of its own, with its settings as variables, as launch passes them. Returns why there is no outcome.
  std::string try_one(Plan& plan, Watchdog& watchdog, int place) const {
    config::Settings settings;
    for (const auto& [key, value] : plan.settings) settings.set(key, value, config::Origin::Flag, "tessera plan");
    settings.expect_consistent();
    auto environment = settings.environment();
    const TemporaryFolder folder("tessera-plan");
    const auto out = folder.path() / "outcome.json", output = folder.path() / "output";
    environment["TESSERA_MACHINE"] = flags_.machine;
    environment["TESSERA_DRY_RUN"] = fmt::format("{}/{}", plan.world, here_);
    environment["TESSERA_DRY_RUN_OUT"] = out;
    const auto rows = std::to_string(flags_.batch_size), length = std::to_string(flags_.length);
    const std::vector<std::string> own = {this_program(), "plan", flags_.words.front(), "-n", "1",
                                          "--batch-size", rows, "--length", length};
    // A file and not a pipe, for whose end a child of the program could make this process wait.
    const Fd file(::open(output.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, S_IRUSR | S_IWUSR));
    auto process = started(is_program_ ? flags_.words : own, environment, [&] {
      ::setpgid(0, 0);
      for (const int stream : {STDOUT_FILENO, STDERR_FILENO}) ::dup2(file.get(), stream);
    });
    watchdog.watch(place, process.pid());
    const auto ended = process.wait(kLimitOfDryRun);
    ::kill(-process.pid(), SIGKILL);  // also what a program that has ended leaves behind
    watchdog.watch(place, 0);
    auto said = printable(InputFile(output).read_all(), "\n");
    if (ended == 0 && is_there(out)) {
      plan.outcome = nlohmann::ordered_json::parse(InputFile(out).read_all(), nullptr, /*allow_exceptions=*/false);
      if (plan.outcome.is_object() && plan.outcome.value("steps", 0) > 0) return {};
    }
    said.erase(said.find_last_not_of('\n') + 1);
    auto begin = said.size();
    for (int line = 0; line < kLinesOfFailed && begin != std::string::npos; line++)
      begin = begin == 0 ? std::string::npos : said.rfind('\n', begin - 1);
    if (begin != std::string::npos) said.erase(0, begin + 1);
    return fmt::format("{} and has taken no step of training with Tessera{}{}{}",
                       ended ? fmt::format("ended with status {}", *ended) : "was ended after ten minutes",
                       is_program_ && ended == 0 ? ", for which it has to call tessera::init or make a Trainer" : "",
                       said.empty() ? "" : "; last it said: ", said);
  }

  /// Runs all plans, and keeps those that took a step. If none did, throws Error with what the first one said.
  void try_all() {
    for (const auto* name : {"RANK", "WORLD_SIZE", "TESSERA_CONFIG_FILE", kRunVariable, "TESSERA_LAUNCH_RECORD", "TESSERA_LOG_WITH"})
      ::unsetenv(name);
    std::vector<std::string> faults(plans_.size());
    std::atomic<size_t> next = 0;
    const int at_once = is_program_ ? 1 : cores();  // a program may write files
    Watchdog watchdog(at_once);
    std::atomic<size_t> ended = 0;
    const auto work = [&](int place) {
      for (size_t i = next++; i < plans_.size(); i = next++) {
        faults[i] = try_one(plans_[i], watchdog, place);
        ended++;
      }
    };
    std::vector<std::future<void>> workers;
    for (int i = 0; i < at_once; i++) workers.push_back(std::async(std::launch::async, work, i));
    show_progress(workers, ended);
    for (auto& worker : workers) worker.get();
    std::vector<Plan> good;
    for (size_t i = 0; i < plans_.size(); i++) {
      if (faults[i].empty()) {
        good.push_back(std::move(plans_[i]));
      } else {
        left_out_.push_back(fmt::format("{} on {} {}", plans_[i].name == kAsItIs ? "the program" : plans_[i].name,
                                        counted(plans_[i].world, "rank"), faults[i]));
      }
    }
    plans_ = std::move(good);
    if (plans_.empty()) throw Error("no dry run has come to an end: {}", left_out_.front());
  }

  /// Returns when all have ended. Until then a line on a terminal's stderr says how many dry runs have.
  void show_progress(std::vector<std::future<void>>& workers, const std::atomic<size_t>& ended) const {
    const auto display = train::Display::of(stderr);
    const bool is_terminal = display.columns().has_value();
    const auto begin = std::chrono::steady_clock::now();
    for (auto& worker : workers) {
      while (worker.wait_for(std::chrono::seconds(1)) == std::future_status::timeout) {
        const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin;
        if (is_terminal)
          display.write(fmt::format("\r{} of {} have ended after {}", ended.load(), counted(std::ssize(plans_), "dry run"),
                                    train::short_time(passed.count())));
      }
    }
    if (is_terminal) display.write("\r\x1b[K");
  }

  /// The command line that trains by the best plan.
  std::string launch_line() const {
    const auto& [name, world, settings, outcome] = plans_.front();
    const int hosts = std::max(1, world / here_);
    auto line = fmt::format("tessera launch -n {}", std::min(world, here_));
    if (hosts > 1) line += fmt::format(" --nnodes {} --node-rank 0 --rdzv-endpoint node0:29500", hosts);
    for (const auto& [key, value] : settings) {
      auto flag = key;
      std::ranges::replace(flag, '_', '-');
      line += fmt::format(" \\\n    --{} {}", flag, value);
    }
    if (is_program_) return line + " \\\n    " + joined(flags_.words, " ");
    const bool is_llama = model_.recipe == "llama", is_new = is_llama && !model_.has_weights && flags_.method == "full";
    const auto recipe = std::filesystem::path(this_program()).parent_path() / model_.recipe;
    return line + fmt::format(" \\\n    {} {} {} --data FILE --batch-size {} {} {}",
                              is_there(recipe) ? recipe.string() : model_.recipe, is_new ? "--config" : "--model",
                              model_.place.string(), flags_.batch_size, is_llama ? "--length" : "--max-length", flags_.length);
  }

  bool needs_tokenizer() const {
    return !is_program_ && model_.recipe == "llama" && is_folder(model_.place) && !is_there(model_.place / kTokenizer);
  }

  std::string verdict() const {
    const auto& best = plans_.front();
    if (fits(best)) {
      return fmt::format("Take {}{}: a step takes {}, and a rank {}{}:\n\n  {}{}", best.name == kAsItIs ? "" : best.name + " on ",
                         counted(best.world, "rank"), best.time_text("step"), size_text(best.peak()),
                         best.world > here_ ? "; on each host, with its own number after --node-rank" : "", launch_line(),
                         needs_tokenizer() ? fmt::format("\n\nIt reads {}/{}, which is not there yet", model_.place.string(), kTokenizer)
                                           : "");
    }
    const auto& least = *std::ranges::min_element(plans_, {}, &Plan::peak);
    return fmt::format("Nothing fits into {} of a rank; the least is {}, {} on {}. More ranks take less each; so do smaller batches, "
                       "shorter rows, --precision bf16, and --method lora or qlora",
                       size_text(memory_of(least.world)), size_text(least.peak()), least.name, counted(least.world, "rank"));
  }

  /// A step of each plan, and the memory of a rank by kind where it takes the most.
  std::string tables() const {
    std::vector<std::array<std::string, 10>> steps = {
        {"", "ranks", "memory", "fits", "step", "tokens/s", "computes", "sends", "moving", "waits"}};
    constexpr size_t kFirst = 2, kLast = kFirst + kMemoryKinds;
    std::vector<std::array<std::string, kLast + 1>> kinds(plans_.size() + 1);
    kinds[0] = {"memory of a rank", "ranks"};
    kinds[0][kLast] = "most in";
    for (size_t i = 0; i < kMemoryKinds; i++) kinds[0][kFirst + i] = name(static_cast<MemoryKind>(i));
    for (size_t p = 0; p < plans_.size(); p++) {
      const auto& plan = plans_[p];
      const auto& traffic = plan.outcome.at("traffic");
      const auto ranks = std::to_string(plan.world);
      steps.push_back({plan.name, ranks, size_text(plan.peak()), memory_of(plan.world) == 0 ? "?" : fits(plan) ? "yes" : "no",
                       plan.time_text("step"),
                       is_program_ ? "" : train::short_number(tokens_per_second(plan)),
                       duration_text(plan.time("compute") + plan.time("optimizer")),
                       size_text(traffic.at("gathered").get<double>() + traffic.at("reduced").get<double>()),
                       plan.time_text("communication"), plan.time_text("exposed")});
      auto& row = kinds[p + 1];
      row = {plan.name, ranks};
      for (size_t i = 0; i < kMemoryKinds; i++) row[kFirst + i] = size_text(plan.kind(name(static_cast<MemoryKind>(i))));
      row[kLast] = printable(plan.outcome.at("memory").at("where").get<std::string>());
    }
    return table_of(steps, "<>>>>>>>>>") + "\n" + table_of(kinds, "<>>>>>>><");
  }

  /// Bars of the memory of the first plans, in which each kind has its own mark.
  std::string chart() const {
    constexpr std::array<const char*, kMemoryKinds> kBlocks = {"█", "▓", "▒", "░", "▚", "·"}, kLetters = {"#", "=", "+", "-", "o", "."};
    constexpr size_t kBars = 8;
    constexpr int kBesideBars = 36;
    const auto& marks = train::glyphs_of_locale() == train::Glyphs::Blocks ? kBlocks : kLetters;
    const int width = std::max(10, train::Display::of(stdout).columns().value_or(80) - kBesideBars);
    const auto most = std::max(1.0, std::ranges::max(plans_, {}, &Plan::peak).peak());
    std::vector<std::array<std::string, 4>> rows(std::min(plans_.size(), kBars));
    std::string legend;
    for (size_t p = 0; p < rows.size(); p++) {
      const auto& plan = plans_[p];
      rows[p] = {plan.name, std::to_string(plan.world), size_text(plan.peak())};
      double sum = 0;
      int64_t drawn = 0;
      for (size_t i = 0; i < kMemoryKinds; i++) {
        const auto kind = name(static_cast<MemoryKind>(i));
        if (p == 0) legend += fmt::format("{}{} {}", i == 0 ? "" : "  ", marks[i], kind);
        sum += plan.kind(kind);
        for (; drawn < std::lround(sum / most * width); drawn++) rows[p][3] += marks[i];
      }
    }
    return table_of(rows, "<>><") + legend + "\n";
  }

  void print() const {
    fmt::print("{}: {} parameters", joined(flags_.words, " "), train::short_number(plans_.front().outcome.at("parameters").get<double>()));
    if (!is_program_) fmt::print(", {}, {} of {} tokens a rank and step", flags_.method, counted(flags_.batch_size, "row"), flags_.length);
    fmt::print("\nmachine {}: up to {} on a host{}\n\n{}\n{}", flags_.machine, counted(here_, "rank"), memory_text(), tables(), chart());
    if (!is_program_) fmt::print("+ac is with activation checkpointing\n");
    for (const auto& each : left_out_) fmt::print("left out: {}\n", each);
    fmt::print("\n{}\n", verdict());
  }

  void print_json() const {
    const auto none = nlohmann::ordered_json::array();
    nlohmann::ordered_json json = {{"machine", flags_.machine}, {"plans", none}, {"left_out", left_out_}};
    for (const auto& plan : plans_) {
      const auto available = memory_of(plan.world);
      auto& each = json["plans"].emplace_back(nlohmann::ordered_json{
          {"plan", plan.name}, {"world", plan.world}, {"settings", plan.settings}, {"available", available}, {"fits", nullptr}});
      if (available > 0) each["fits"] = fits(plan);
      if (!is_program_) each["tokens_per_second"] = tokens_per_second(plan);
      each.update(plan.outcome);
      each.erase("schedule");  // hundreds of lines
    }
    if (fits(plans_.front())) json["command"] = launch_line();
    json["verdict"] = verdict();
    fmt::print("{}\n", json.dump(2));
  }

  PlanFlags flags_;
  const simulate::Machine machine_;
  const bool is_program_ = flags_.are_of_program();
  int here_;  // ranks of a host
  PlannedModel model_;
  std::vector<Plan> plans_;  // the best first
  std::vector<std::string> left_out_;
};

void add_plan(CLI::App& app, std::function<int()>& chosen) {
  auto* command = app.add_subcommand("plan", "Says what memory and time training takes, before it runs, and how best to shard it");
  command->formatter(std::make_shared<HelpWithUsage>("tessera plan -n N [OPTIONS] MODEL | -- PROGRAM ARGS..."));
  const auto flags = std::make_shared<PlanFlags>();
  command
      ->add_option("MODEL", flags->words,
                   "A Hugging Face folder, its config.json, a .safetensors file beside one, or a GGUF file, whose weights are not read; or, after "
                   "--, a program that trains, with its arguments")
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
                   "How to shard; may be repeated. All that make sense unless given, and a program as it is; a program with a Trainer "
                   "follows")
      ->allow_extra_args(false)
      ->check(one_of({"FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD", kNodeShared}));
  command->add_option("--precision", flags->precision, "In which dtype to compute; a program with a Trainer follows")
      ->capture_default_str()->check(one_of({"fp32", "bf16"}));
  command->add_option("--batch-size", flags->batch_size, "Rows of a rank and step")->capture_default_str()->check(from_to(1, 1'000'000));
  command->add_option("--length", flags->length, "Tokens in a row; 512, or as many as the model takes, unless given")
      ->check(from_to(2, 10'000'000));
  command->add_option("--method", flags->method, "full: all weights train; lora: adapters train; qlora: beside quantised weights")
      ->capture_default_str()
      ->check(one_of({"full", "lora", "qlora"}));
  command->add_option("--rank", flags->rank, "Rank of adapters")->capture_default_str()->check(from_to(1, 100'000));
  command
      ->add_option("--machine", flags->machine,
                   "The file of tessera test --calibrate; or cpu or gpu, which are built-in round numbers for servers")
      ->capture_default_str();
  const auto memory_of_text = [](const std::string& text) {
    const auto bytes = bytes_of(text);
    if (bytes < kLeastMemory) throw ConfigError("'{}' is less than a megabyte; write the unit, such as 80GB", text);
    return bytes;
  };
  add_value(*command, "--memory", flags->memory, memory_of_text,
            "What a rank may use, such as 64GB; its part of the machine's unless given")
      ->type_name("SIZE");
  command->add_flag("--json", flags->as_json, "As JSON");
  command->footer(Help::footer_of(
      {"tessera plan SmolLM2-135M -n 2 -n 8", "tessera plan Llama-3.1-8B -n 64 --precision bf16 --memory 80GB --machine gpu",
       "tessera plan -n 64 -- ./train --layers 32"},
      "The status is 3 if nothing fits. docs/planning.md explains the tables."));
  command->callback([&chosen, command, flags] {
    flags->expect_use(*command);
    chosen = [flags] { return PlanCommand(*flags).run(); };
  });
}

const AddedCommand plan_command("plan", add_plan);

}  // namespace
}  // namespace tessera::cli
