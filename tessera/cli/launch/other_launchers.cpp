#include "tessera/cli/launch/other_launchers.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <string_view>

namespace tessera::cli {
namespace {

struct OtherWord {
  std::string_view name;  // a * at its end matches any end
  std::string_view reason;

  bool is_it(std::string_view word) const { return name.ends_with('*') ? word.starts_with(name.substr(0, name.size() - 1)) : word == name; }
};

constexpr std::string_view kPrograms =
    "launch starts programs, not modules or functions of Python; write tessera launch -n N python -m MODULE";
constexpr std::string_view kLogs = "--log-dir FOLDER keeps what each rank prints, and --tee says which output is also shown";
constexpr std::string_view kPods = "Tessera starts no TPU pods; run tessera launch on each machine";
constexpr std::string_view kDeepSpeed =
    "DeepSpeed is a Python library; give its JSON file by --config-file, and Tessera shards by FSDP";
constexpr std::string_view kPythonOnly = "it names a part of a Python program";

constexpr std::array kRefusedByLaunch = {
    OtherWord{"-m", kPrograms},
    OtherWord{"--module", kPrograms},
    OtherWord{"--run-path", kPrograms},
    OtherWord{"-r", kLogs},
    OtherWord{"-t", kLogs},
    OtherWord{"--redirects", kLogs},
    OtherWord{"--local-ranks-filter", kLogs},
    OtherWord{"--duplicate-stdout-filters", kLogs},
    OtherWord{"--duplicate-stderr-filters", kLogs},
    OtherWord{"--event-log-handler", kPythonOnly},
    OtherWord{"--logs-specs", kPythonOnly},
    OtherWord{"--local-addr", "nodes meet at the address in --rdzv-endpoint, and find their own addresses"},
    OtherWord{"--numa-binding", "--enable-cpu-affinity true binds each rank to cores of its own"},
    OtherWord{"--virtual-local-rank", "each rank has a LOCAL_RANK of its own"},
    OtherWord{"--np", "write --nproc-per-node"},
    OtherWord{"--world-size", "write --nproc-per-node for the ranks of this host, or --num-processes for those of all"},
    OtherWord{"--tpu*", kPods},
    OtherWord{"--no-tpu-cluster", kPods},
    OtherWord{"--vm", kPods},
    OtherWord{"--env", kPods},
    OtherWord{"--use-deepspeed", kDeepSpeed},
    OtherWord{"--deepspeed-*", kDeepSpeed},
    OtherWord{"--zero-stage", kDeepSpeed},
    OtherWord{"--zero3-*", kDeepSpeed},
    OtherWord{"--offload-optimizer-*", kDeepSpeed},
    OtherWord{"--offload-param-*", kDeepSpeed},
    OtherWord{"--use-megatron-lm", "Megatron-LM is a Python library; use FSDP"},
    OtherWord{"--megatron-lm-*", "Megatron-LM is a Python library; use FSDP"},
    OtherWord{"--fp8-*", "libtorch has no fp8 training in C++; --mixed-precision has bf16 and fp16"},
    OtherWord{"--aws-*", "Tessera starts no jobs of SageMaker; run tessera launch in the container"},
    OtherWord{"--mpirun-hostfile", "Tessera does not start mpirun; run mpirun --hostfile FILE -n N PROGRAM yourself"},
};

constexpr std::array kRefusedCommands = {
    OtherWord{"estimate-memory", "tessera plan MODEL -n RANKS says more: the memory of each strategy, with activations, and the time of a step"},
    OtherWord{"tpu-config", kPods},
};

struct WithoutEffect {
  const char* name;
  bool has_value;
  std::string_view reason;  // empty if the flag asks for what launch does in any case
};

constexpr std::array kWithoutEffect = {
    WithoutEffect{"--no-python", false, ""},
    WithoutEffect{"--use-parallelism-config", false, ""},
    WithoutEffect{"--rdzv-id", true, "nodes of one job are those that meet at one --rdzv-endpoint"},
    WithoutEffect{"--rdzv-conf", true, "nodes meet in Tessera's own store; --node-timeout says when one is lost"},
    WithoutEffect{"--monitor-interval", true, "launch is told at once when a rank ends"},
    WithoutEffect{"--start-method", true, "ranks are programs, which can be started in one way only"},
    WithoutEffect{"--role", true, "all ranks have the same role"},
    WithoutEffect{"--signals-to-handle", true, "launch passes on every signal that asks it to end, and SIGUSR1 and SIGUSR2"},
};

template <size_t size>
std::string reason_in(const std::array<OtherWord, size>& words, const std::string& word) {
  const auto found = std::ranges::find_if(words, [&](const OtherWord& each) { return each.is_it(word); });
  return found == words.end() ? std::string() : std::string(found->reason);
}

}  // namespace

std::string reason_against(const CLI::App& command, const std::string& word) {
  if (command.get_parent() == nullptr) return reason_in(kRefusedCommands, word);
  return command.get_name() == "launch" ? reason_in(kRefusedByLaunch, word) : std::string();
}

void add_flags_without_effect(CLI::App& launch, const std::shared_ptr<std::vector<std::string>>& remarks) {
  for (const auto& flag : kWithoutEffect) {
    const auto remark = [remarks, &flag] {
      if (!flag.reason.empty()) remarks->push_back(fmt::format("{} has no effect: {}", flag.name, flag.reason));
    };
    auto* option = flag.has_value ? launch.add_option_function<std::string>(flag.name, [remark](const std::string&) { remark(); })
                                  : launch.add_flag_callback(flag.name, remark);
    option->group("");
  }
}

}  // namespace tessera::cli
