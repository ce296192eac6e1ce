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

const std::vector<Choice> kMachines = {{"NO", "No distributed training"}, {"MULTI_CPU", "multi-CPU"}, {"MULTI_GPU", "multi-GPU"}, {"XLA", "XLA devices, such as TPUs"}};

const std::vector<Choice> kStateDictsOfVersion2 = {{"SHARDED_STATE_DICT", "SHARDED_STATE_DICT"}, {"FULL_STATE_DICT", "FULL_STATE_DICT"}};

/// All choices of a key, shown as they are written in files.
std::vector<Choice> menu(std::string_view key) {
  std::vector<Choice> choices;
  for (const auto value : config::find_key(key)->choices) choices.push_back({std::string(value), std::string(value)});
  return choices;
}

/// The value of the choice that an answer names, by its value or its label in any case; nothing if it names none.
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
    ask_machine();
    ask_machines();
    if (!is_alone() &&
        is_yes({.name = "use_deepspeed", .text = "Do you want to start from a configuration of DeepSpeed?", .otherwise = "no"})) {
      ask_deepspeed();
    } else if (wants_fsdp()) {
      ask_fsdp();
    } else {
      ask_devices();
    }
    if (!is_alone())
      ask_key({.name = "num_processes",
               .text = "How many ranks shall there be on all machines together?",
               .otherwise = settings_.text("num_machines")});
    if (!settings_.is_set("mixed_precision")) {
      ask_key({.name = "mixed_precision",
               .text = "Do you wish to use mixed precision?",
               .choices = menu("mixed_precision"),
               .otherwise = "no"});
    }
    // Given answers for which there is no question hold, too.
    set_given(settings_, given_);
    settings_.expect_consistent();
    return settings_;
  }

 private:
  bool is_alone() const { return settings_.text("distributed_type") == "NO"; }

  void ask_machine() {
    const auto given = given_.find("distributed_type");
    if (given != given_.end() && given->second.value == "FSDP") {
      ask_key({.name = "distributed_type", .text = ""});
      return;
    }
    ask_key({.name = "distributed_type", .text = "Which type of machine are you using?", .choices = kMachines, .otherwise = "MULTI_CPU"});
    if (is_alone()) {
      ask_key({.name = "use_cpu", .text = "Do you want to train on the CPU even if there is a GPU?", .otherwise = "no"});
    } else if (!given_.contains("use_cpu")) {
      set("use_cpu", settings_.text("distributed_type") == "MULTI_CPU" ? "true" : "false");
    }
  }

  void ask_machines() {
    if (is_alone()) return;
    ask_key({.name = "num_machines", .text = "How many different machines will you use?", .otherwise = "1"});
    if (settings_.integer("num_machines") == 1) return;
    ask_key({.name = "machine_rank", .text = "What is the rank of this machine? They are counted from 0", .otherwise = "0"});
    ask_key({.name = "main_process_ip", .text = "What is the IP address of machine 0?"});
    ask_key({.name = "main_process_port", .text = "What is the port on machine 0 at which ranks meet?", .otherwise = "29500"});
  }

  void ask_deepspeed() {
    const Question question{.name = "deepspeed_config_file", .text = "What is the path of the JSON file of DeepSpeed?"};
    ask_until(question, [&](const std::string& file, const std::string&) {
      auto changed = settings_;
      changed.read_file(file);
      settings_ = std::move(changed);
    });
  }

  bool wants_fsdp() {
    if (is_alone() || settings_.text("distributed_type") == "XLA") return false;
    if (settings_.text("distributed_type") == "FSDP") return true;
    const bool wants = is_yes({.name = "use_fsdp", .text = "Do you want to use FullyShardedDataParallel?", .otherwise = "yes"});
    if (wants) set("distributed_type", "FSDP");
    return wants;
  }

  void ask_fsdp() {
    ask_key({.name = "fsdp_version", .text = "What should be your FSDP version?", .choices = menu("fsdp_version"), .otherwise = "2"});
    const bool is_first = settings_.text("fsdp_version") == "1";
    if (is_first) {
      ask_key({.name = "fsdp_sharding_strategy",
               .text = "What should be your sharding strategy?",
               .choices = menu("fsdp_sharding_strategy"),
               .otherwise = "FULL_SHARD"});
    } else {
      ask_key({.name = "fsdp_reshard_after_forward", .text = "Do you want to reshard parameters after forward?", .otherwise = "yes"});
    }
    if (!settings_.is_true("use_cpu") || given_.contains("fsdp_offload_params"))  // on CPUs they are there already
      ask_key({.name = "fsdp_offload_params", .text = "Do you want to keep parameters and gradients in host memory?", .otherwise = "no"});
    ask_units();
    if (is_first) {
      ask_key({.name = "fsdp_backward_prefetch",
               .text = "What should be your backward prefetch policy?",
               .choices = menu("fsdp_backward_prefetch"),
               .otherwise = "BACKWARD_PRE"});
    }
    if (given_.contains("fsdp_state_dict_type") ||
        is_yes({.name = "use_accelerate_checkpoints", .text = "Shall checkpoints be those of Accelerate?", .otherwise = "no"})) {
      ask_key({.name = "fsdp_state_dict_type",
               .text = "What should be your state dict type?",
               .choices = is_first ? menu("fsdp_state_dict_type") : kStateDictsOfVersion2,
               .otherwise = "SHARDED_STATE_DICT"});
    }
    if (is_first) {
      ask_key({.name = "fsdp_forward_prefetch", .text = "Do you want to gather the next unit already in forward?", .otherwise = "no"});
      ask_key({.name = "fsdp_use_orig_params", .text = "Shall parameters keep their names?", .otherwise = "yes"});
    }
    ask_key({.name = "fsdp_cpu_ram_efficient_loading", .text = "Shall only rank 0 load the values of the model?", .otherwise = "yes"});
    if (is_first && !settings_.is_true("fsdp_cpu_ram_efficient_loading")) {
      ask_key({.name = "fsdp_sync_module_states", .text = "Shall all ranks begin with the parameters of rank 0?", .otherwise = "yes"});
    }
    ask_key({.name = "fsdp_activation_checkpointing", .text = "Do you want to enable activation checkpointing?", .otherwise = "no"});
    if (!is_first) ask_sizes();
  }

  void ask_units() {
    ask_key({.name = "fsdp_auto_wrap_policy",
             .text = "What should be your auto wrap policy?",
             .choices = menu("fsdp_auto_wrap_policy"),
             .otherwise = "TRANSFORMER_BASED_WRAP"});
    const auto& policy = settings_.text("fsdp_auto_wrap_policy");
    if (policy == "TRANSFORMER_BASED_WRAP") {
      ask_key({.name = "fsdp_transformer_layer_cls_to_wrap",
               .text = "Which classes become units? With commas between, such as BertLayer,T5Block"});
    } else if (policy == "SIZE_BASED_WRAP") {
      ask_key({.name = "fsdp_min_num_params", .text = "How many parameters must a unit have at least?", .otherwise = "1e8"});
    }
  }

  void ask_sizes() {
    const bool is_given = given_.contains("parallelism_config_dp_replicate_size") || given_.contains("parallelism_config_dp_shard_size");
    if (!is_given && !is_yes({.name = "use_parallelism_config", .text = "Shall there be several copies of the model?", .otherwise = "no"}))
      return;
    ask_key({.name = "parallelism_config_dp_replicate_size", .text = "How many copies shall there be?", .otherwise = "1"});
    ask_key({.name = "parallelism_config_dp_shard_size", .text = "How many ranks shall share a copy?", .otherwise = "1"});
  }

  void ask_devices() {
    if (settings_.is_true("use_cpu")) return;
    ask_key({.name = "gpu_ids", .text = "Which GPUs of this machine? Numbers with commas between, or all", .otherwise = "all"});
    ask_key({.name = "enable_cpu_affinity", .text = "Shall each rank be bound to its own processor cores?", .otherwise = "no"});
  }

  /// Asks the question again as long as `take` refuses the answer with a ConfigError.
  void ask_until(const Question& question, const std::function<void(const std::string& answer, const std::string& where)>& take) {
    if (const auto given = given_.extract(question.name)) {
      const auto& [value, where] = given.mapped();
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
      } catch (const IoError& error) {  // a file that was named can't be read
        complaint = error.what();
      }
    }
    throw ConfigError("'{}' was asked {} times without an answer that fits: {}", question.text, kPatience, complaint);
  }

  void ask_key(const Question& question) {
    ask_until(question, [&](const std::string& answer, const std::string& where) {
      auto value = answer;
      if (!question.choices.empty()) {
        const auto chosen = chosen_value(question, answer);
        value = chosen.value_or(answer);
      }
      const auto& key = *config::find_key(question.name);
      if (where.empty()) value = config::to_value(key, value);  // a complaint needs no place
      auto changed = settings_;
      changed.set(question.name, value, Origin::File, where.empty() ? "your answer" : where);
      changed.expect_consistent();
      settings_ = std::move(changed);
    });
  }

  bool is_yes(const Question& question) {
    bool result = false;
    ask_until(question, [&](const std::string& answer, const std::string& where) {
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
  return name == "use_deepspeed" || name == "deepspeed_config_file" || name == "use_fsdp" || name == "use_accelerate_checkpoints" ||
         name == "use_parallelism_config";
}

Settings interview(const Ask& ask, GivenAnswers given) {
  return Interview(ask, std::move(given)).run();
}

}  // namespace tessera::cli
