#include "tessera/base/env_table.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <vector>

#include "tessera/base/words.h"

namespace tessera {
namespace {

constexpr std::string_view kPrefix = "TESSERA_";

constexpr std::array kTable = {
    EnvVariable{"TESSERA_TRANSPORT", "auto, self, shm, gloo, gloo_collectives, mpi, nccl, xla",
                "the transport of the ranks, if neither `InitOptions::transport` nor `tessera_transport` names one", "`tessera::init`, `Trainer`"},
    EnvVariable{"TESSERA_DEVICE", "cpu, cuda, cuda:1, xla", "the device of the ranks' tensors, if the program names none; cpu if unset",
                "`tessera::init`, `run_ranks`"},
    EnvVariable{"TESSERA_PJRT_PLUGIN", "cpu, tpu, cuda, or a path", "the PJRT plugin whose devices are `xla`; cpu if unset",
                "`tessera::xla::init`"},
    EnvVariable{"TESSERA_XLA_CACHE", "a folder",
                "where compiled programs are kept for the next process; the user's cache folder if unset, `none` to keep none", "XLA devices"},
    EnvVariable{"TESSERA_XLA_DEVICES", "a number",
                "how many devices `tessera::init` takes for a world of XLA devices; if unset, all of them, but only one CPU",
                "`tessera::init`"},
    EnvVariable{"TESSERA_XLA_TRACE_ONLY", "a number",
                "traces the programs for this number of replicas, and runs none of them; `tessera xla compile` sets it", "XLA devices"},
    EnvVariable{"TESSERA_XLA_METRICS", "0, 1", "prints `metrics_report()` on standard error when the process ends", "XLA devices"},
    EnvVariable{"TESSERA_XLA_PROGRAMS", "a folder",
                "where each process writes the text and the statistics of its programs, for `tessera xla program`", "XLA devices"},
    EnvVariable{"TESSERA_STORE", "file:PATH", "a new file that all ranks can see, through which they meet instead of `MASTER_ADDR`",
                "`tessera::init`"},
    EnvVariable{"TESSERA_LEVELS", "1, 2",
                "1: between hosts, each rank sends and receives for itself; 2, the default: data crosses the network once a host",
                "`tessera::init`"},
    EnvVariable{"TESSERA_HOST_ID", "any text", "ranks with the same text count as ranks of one host", "`tessera::init`"},
    EnvVariable{"TESSERA_SILENCE_LIMIT", "seconds",
                "how long another host may acknowledge nothing until its connections are ended; 30 if unset, 0 for no limit", "`tessera::init`, `tessera launch`"},
    EnvVariable{"TESSERA_CONFIG_FILE", "a path",
                "the configuration that launch reads unless `--config-file` names one, and that a `Trainer` reads under other launchers",
                "`tessera launch`, `Trainer`"},
    EnvVariable{"TESSERA_SETTINGS_FROM", "lines", "where the settings of ranks come from; set by `tessera launch`", "`Trainer`"},
    EnvVariable{"TESSERA_RESIDENCE", "auto, gathered, node-shared", "where the memory of units is, if `ShardOptions::residence` does not say",
                "`fully_shard`, `Trainer`"},
    EnvVariable{"TESSERA_DETECT_ANOMALY", "0, 1",
                "looks for inf and NaN in each gradient before it is averaged, and names the parameter and the rank", "the library"},
    EnvVariable{"TESSERA_LOG", "debug, info, warning, error", "the lowest level that is logged; warning if unset", "the library"},
    EnvVariable{"TESSERA_DRY_RUN", "64, or 64/8",
                "makes the program a dry run of so many ranks, or of so many with 8 on each host: no values, no other processes; what a step takes "
                "is printed, and the program ends",
                "`tessera::init`"},
    EnvVariable{"TESSERA_DRY_RUN_OUT", "a path", "the file to which a dry run writes what a step takes, as JSON, in place of printing it",
                "dry runs"},
    EnvVariable{"TESSERA_MACHINE", "cpu, gpu, or a path",
                "the machine by which dry runs count seconds, from `tessera test --calibrate`; `cpu` if unset", "dry runs, `tessera plan`"},
    EnvVariable{"TESSERA_RECORD", "a folder",
                "where ranks leave the record of the run: `run.json`, a line a second, and traces; `tessera launch --record` sets it",
                "`tessera::init`"},
    EnvVariable{"TESSERA_PEAK_FLOPS", "operations per second",
                "what a rank can compute at most, such as 312e12, for the model FLOPs utilisation; measured if unset", "`Run`"},
    EnvVariable{"TESSERA_LAUNCH_RECORD", "a path",
                "the file in which a rank records that it waits at the start, that it has read the settings, and which rank made it fail; set "
                "by `tessera launch`",
                "the library"},
    EnvVariable{"TESSERA_SECRET", "any text", "what a process must know to join the job; set by `tessera launch`",
                "`tessera::init`, `tessera launch`"},
    EnvVariable{"TESSERA_SECRET_FILE", "a path", "the file with that text, readable by you alone, if `TESSERA_SECRET` is unset",
                "`tessera::init`, `tessera launch`"},
    EnvVariable{"TESSERA_STARTED_BY_TEST", "1", "the heading is already printed; set by `tessera test` for its ranks", "`tessera test`"},
    EnvVariable{"TESSERA_STARTED_APART", "1", "this process is the child in which a plugin is loaded; set by `tessera xla`", "`tessera xla`"},
    EnvVariable{"TESSERA_TORCH", "a folder", "the libtorch to build with, or the torch folder of a Python installation",
                "`./quickstart`, `./check`, CMake"},
    EnvVariable{"TESSERA_TORCH_INDEX", "a URL", "the package index from which torch is installed", "`./quickstart`, `./check`"},
    EnvVariable{"TESSERA_PYTHON", "a program", "the Python interpreter that is asked for its torch", "CMake, by `-D` only"},
    EnvVariable{"TESSERA_SAFETENSORS_PYTHON", "a program", "the Python interpreter with safetensors that the tests use",
                "CMake, by `-D` only"},
    EnvVariable{"TESSERA_TENSORBOARD_PYTHON", "a program", "the Python interpreter with TensorBoard that the tests use",
                "CMake, by `-D` only"},
    EnvVariable{"TESSERA_CCACHE", "a program", "the ccache to compile with; empty for none", "CMake, by `-D` only"},
    EnvVariable{"TESSERA_LINK_CUDA", "ON, OFF", "links the CUDA part of libtorch", "CMake, by `-D` only"},
    EnvVariable{"TESSERA_SANITIZE", "address, thread", "builds everything with that sanitizer", "CMake, by `-D` only"},
    EnvVariable{"TESSERA_WARNINGS_AS_ERRORS", "ON, OFF", "treats compiler warnings as errors", "CMake, by `-D`, and the preset `release`"},
    EnvVariable{"TESSERA_TESTS", "ON, OFF", "builds the tests", "CMake, by `-D` only"},
    EnvVariable{"TESSERA_LONG_TESTS", "ON, OFF", "builds and runs also the tests that are too slow for every run",
                "`./check`; CMake, by `-D` only"},
    EnvVariable{"TESSERA_POISON", "0, 1", "fills the memory of unsharded parameters with NaN before it is freed", "the library", true},
    EnvVariable{"TESSERA_PROPERTY_FIRST", "a number", "the seed of the first random model", "test `shard/property`", true},
    EnvVariable{"TESSERA_PROPERTY_SECONDS", "a number", "how many seconds random models are compared for", "test `shard/property`", true},
    EnvVariable{"TESSERA_TEST_*", "any text", "what a test passes to the processes that it starts", "tests", true},
};

/// Never destroyed, because variables are read until the process ends.
std::vector<EnvVariable>& all_env() {
  static auto& all = *new std::vector<EnvVariable>(kTable.begin(), kTable.end());
  return all;
}

bool names(const EnvVariable& variable, std::string_view name) {
  if (variable.name.ends_with('*')) return name.starts_with(variable.name.substr(0, variable.name.size() - 1));
  return name == variable.name;
}

std::string with_suggestion(std::string_view name) {
  std::vector<std::string> known;
  for (const auto& variable : all_env()) known.emplace_back(variable.name);
  const auto nearest = nearest_name(name, known, kPrefix);
  return nearest.empty() ? std::string(name) : fmt::format("{} (did you mean {}?)", name, nearest);
}

}  // namespace

std::span<const EnvVariable> env_table() {
  return all_env();
}

AddedEnv::AddedEnv(const std::vector<EnvVariable>& variables) {
  std::ranges::copy_if(variables, std::back_inserter(all_env()), [](const EnvVariable& each) { return !is_known_env(each.name); });
}

bool is_known_env(std::string_view name) {
  return !name.starts_with(kPrefix) || std::ranges::any_of(all_env(), [&](const auto& variable) { return names(variable, name); });
}

std::optional<std::string> warning_of_unknown_env() {
  std::vector<std::string> unknown;
  for (char** entry = environ; *entry != nullptr; entry++) {
    const std::string_view text = *entry;
    const auto name = text.substr(0, text.find('='));
    const bool empty = name.size() + 1 >= text.size();  // env() treats it as unset
    if (!empty && !is_known_env(name)) unknown.push_back(with_suggestion(name));
  }
  if (unknown.empty()) return std::nullopt;
  return fmt::format("the environment has {}, which Tessera does not read; docs/tables/environment.md lists what it does read",
                     fmt::join(unknown, " and "));
}

}  // namespace tessera
