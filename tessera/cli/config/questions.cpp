#include "tessera/cli/config/questions.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/config/value.h"

namespace tessera::cli {
namespace {

using config::Origin;
using config::Settings;

/// Questions that belong to no key.
const std::vector<Question> kOthers = {
    {.name = "use_deepspeed", .text = "Do you want to start from a configuration of DeepSpeed?", .otherwise = "no"},
    {.name = "deepspeed_config_file", .text = "What is the path of the JSON file of DeepSpeed?"},
    {.name = "use_fsdp", .text = "Do you want to use FullyShardedDataParallel?", .otherwise = "yes"},
    {.name = "use_accelerate_checkpoints", .text = "Shall checkpoints be those of Accelerate?", .otherwise = "no"},
    {.name = "use_parallelism_config", .text = "Shall there be several copies of the model?", .otherwise = "no"},
};

/// Makes a question from the row of a key: yes or no for true and false, a menu for other choices.
Question question_of(const config::Key& key) {
  Question question{.name = std::string(key.name),
                    .text = std::string(key.question),
                    .otherwise = std::string(key.answer.empty() ? key.otherwise : key.answer)};
  if (key.otherwise == "true" || key.otherwise == "false") {
    if (key.answer.empty()) question.otherwise = key.otherwise == "true" ? "yes" : "no";
    return question;
  }
  const auto& labels = key.labels.empty() ? key.choices : key.labels;
  for (size_t i = 0; i < labels.size(); i++) question.choices.push_back({std::string(key.choices[i]), std::string(labels[i])});
  return question;
}

/// Returns the value of the choice whose value or label is the answer, in any case; nothing if there is no such choice.
std::optional<std::string> chosen_value(const Question& question, const std::string& answer) {
  const auto same = [&](const std::string& text) {
    return std::ranges::equal(text, answer, [](unsigned char a, unsigned char b) { return std::tolower(a) == std::tolower(b); });
  };
  const auto found = std::ranges::find_if(question.choices, [&](const Choice& choice) { return same(choice.value) || same(choice.label); });
  if (found == question.choices.end()) return std::nullopt;
  return found->value;
}

class Interview {
 public:
  Interview(const Ask& ask, GivenAnswers given) : ask_(ask), given_(std::move(given)) {}

  Settings run() {
    ask("distributed_type");
    if (is_alone()) {
      ask("use_cpu");
    } else if (text("distributed_type") != "FSDP" && !given_.contains("use_cpu")) {
      set("use_cpu", text("distributed_type") == "MULTI_CPU" ? "true" : "false");
    }
    if (!is_alone()) ask("num_machines");
    if (!is_alone() && settings_.integer("num_machines") > 1) ask_all({"machine_rank", "main_process_ip", "main_process_port"});
    if (!is_alone() && is_yes("use_deepspeed")) {
      ask_deepspeed();
    } else if (wants_fsdp()) {
      ask_fsdp();
    } else if (!settings_.is_true("use_cpu")) {
      ask_all({"gpu_ids", "enable_cpu_affinity"});
    }
    if (!is_alone()) ask("num_processes");
    if (!settings_.is_set("mixed_precision")) ask("mixed_precision");
    // Answers that were given to questions that were not asked count, too.
    set_given(settings_, given_);
    settings_.expect_consistent();
    return settings_;
  }

 private:
  const std::string& text(std::string_view key) const { return settings_.text(key); }
  bool is_alone() const { return text("distributed_type") == "NO"; }

  void ask_deepspeed() {
    ask_until(other("deepspeed_config_file"), [&](const std::string& file, const std::string&) {
      auto changed = settings_;
      changed.read_file(file);
      settings_ = std::move(changed);
    });
  }

  bool wants_fsdp() {
    if (is_alone() || text("distributed_type") == "XLA") return false;
    if (text("distributed_type") == "FSDP") return true;
    const bool wants = is_yes("use_fsdp");
    if (wants) set("distributed_type", "FSDP");
    return wants;
  }

  void ask_fsdp() {
    ask_all({"fsdp_version", "fsdp_sharding_strategy"});
    const bool is_first = text("fsdp_version") == "1";
    if (!is_first) ask("fsdp_reshard_after_forward");
    // On CPUs, parameters are in host memory already.
    if (!settings_.is_true("use_cpu") || given_.contains("fsdp_offload_params")) ask("fsdp_offload_params");
    ask("fsdp_auto_wrap_policy");
    if (text("fsdp_auto_wrap_policy") == "TRANSFORMER_BASED_WRAP") ask("fsdp_transformer_layer_cls_to_wrap");
    if (text("fsdp_auto_wrap_policy") == "SIZE_BASED_WRAP") ask("fsdp_min_num_params");
    ask("fsdp_backward_prefetch");
    if (given_.contains("fsdp_state_dict_type") || is_yes("use_accelerate_checkpoints")) ask("fsdp_state_dict_type");
    ask_all({"fsdp_forward_prefetch", "fsdp_use_orig_params", "fsdp_cpu_ram_efficient_loading"});
    if (!settings_.is_true("fsdp_cpu_ram_efficient_loading")) ask("fsdp_sync_module_states");
    ask("fsdp_activation_checkpointing");
    if (!is_first) ask_sizes();
  }

  void ask_sizes() {
    const bool is_given = given_.contains("parallelism_config_dp_replicate_size") || given_.contains("parallelism_config_dp_shard_size");
    if (is_given || is_yes("use_parallelism_config")) ask_all({"parallelism_config_dp_replicate_size", "parallelism_config_dp_shard_size"});
  }

  /// Passes the given answer to `take` or, without one, asks until `take` accepts the answer: until it throws no ConfigError or IoError.
  void ask_until(const Question& question, const std::function<void(const std::string& answer, const std::string& where)>& take) {
    if (const auto given = given_.extract(question.name)) {
      const auto& [value, origin, where] = given.mapped();
      take(value.empty() ? question.otherwise : value, where);
      return;
    }
    constexpr int kPatience = 20;
    std::string complaint;
    for (int asked = 0; asked < kPatience; asked++) {
      const auto answer = ask_(question, complaint);
      try {
        if (answer.empty() && question.otherwise.empty()) throw ConfigError("this question needs an answer");
        take(answer.empty() ? question.otherwise : answer, "");
        return;
      } catch (const ConfigError& error) {
        complaint = error.what();
      } catch (const IoError& error) {  // the file that the answer names can't be read
        complaint = error.what();
      }
    }
    throw ConfigError("'{}' was asked {} times without a valid answer: {}", question.text, kPatience, complaint);
  }

  /// Asks for the value of a key. Skips a key of version 1 if the configuration is of version 2.
  void ask(std::string_view name) {
    const auto& key = *config::find_key(name);
    const bool is_second = text("fsdp_version") == "2";
    if (key.is_of_version_1 && is_second) return;
    auto question = question_of(key);
    if (name == "num_processes") question.otherwise = text("num_machines");
    if (name == "fsdp_state_dict_type" && is_second)
      question.choices = {{"SHARDED_STATE_DICT", "SHARDED_STATE_DICT"}, {"FULL_STATE_DICT", "FULL_STATE_DICT"}};
    ask_until(question, [&](const std::string& answer, const std::string& where) {
      auto value = chosen_value(question, answer).value_or(answer);
      if (where.empty()) value = config::to_value(key, value);  // the error names no place, because the user has just typed the value
      auto changed = settings_;
      changed.set(name, value, Origin::File, where.empty() ? "your answer" : where);
      changed.expect_consistent();
      settings_ = std::move(changed);
    });
  }

  void ask_all(std::initializer_list<std::string_view> names) {
    for (const auto name : names) ask(name);
  }

  static const Question& other(std::string_view name) { return *std::ranges::find(kOthers, name, &Question::name); }

  bool is_yes(std::string_view name) {
    bool result = false;
    ask_until(other(name), [&](const std::string& answer, const std::string& where) {
      const auto value = config::to_bool(answer);
      if (!value) throw ConfigError("{}{}'{}' is not yes or no", where, where.empty() ? "" : ": ", printable(answer));
      result = *value;
    });
    return result;
  }

  void set(std::string_view key, std::string_view value) { settings_.set(key, value, Origin::File, "your answer"); }

  const Ask& ask_;
  GivenAnswers given_;
  Settings settings_;
};

}  // namespace

bool is_question(std::string_view name) {
  return std::ranges::find(kOthers, name, &Question::name) != kOthers.end();
}

Settings interview(const Ask& ask, GivenAnswers given) {
  return Interview(ask, std::move(given)).run();
}

}  // namespace tessera::cli
