// Errors for command lines that are wrong, or have flags of other launchers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

#include "tests/testing/folder.h"
#include "tests/testing/launched.h"

namespace tessera::testing::command_line_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

Launched::Ended tessera(Command arguments) {
  arguments.insert(arguments.begin(), std::filesystem::path(this_program()).parent_path().parent_path() / "bin/tessera");
  return Launched(arguments, {{"HF_HOME", "/no/such/folder"}}).end();
}

struct Line {
  Command arguments;
  const char* says;
};

void PrintTo(const Line& line, std::ostream* out) {
  for (const auto& word : line.arguments) *out << word << ' ';
}

TEST(CommandLine, IsRefusedInWordsOfOurOwn) {
  const Line wrong[] = {
      {{"test", "--ranks", "x"}, "--ranks: 'x' is not a whole number from 1 to 64; see tessera test --help"},
      {{"test", "--ranks", "2.5"}, "--ranks: '2.5' is not a whole number from 1 to 64"},
      {{"test", "--limit", "0"}, "--limit: '0' is not a number from 0.1 to 3600"},
      {{"test", "--transport", "pigeon"}, "--transport: 'pigeon' is not one of all, self, threads, shm, gloo, gloo_collectives, mpi, nccl, fake"},
      {{"test", "--ranks", "2", "--ranks", "3"}, "--ranks is given more than once; leave all but one out"},
      {{"env", "--json=x"}, "--json takes no value"},
      {{"completion", "tcsh"}, "SHELL: 'tcsh' is not one of bash, fish, zsh"},
      {{"ckpt", "prune", "p", "--keep-last", "0"}, "--keep-last: '0' is not a whole number from 1 to 2147483647"},
      {{"ckpt", "prune", "p", "--keep-every", "z"}, "--keep-every: 'z' is not a whole number from 1 to 9223372036854775807"},
      {{"ckpt", "reshard", "a", "b", "--world", "x"}, "--world: 'x' is not a whole number from 1 to 65536"},
      {{"ckpt", "inspect"}, "PATH is required"},
      {{"ckpt", "inspect", "a", "b"}, "'b' belongs to no flag"},
      {{"launch", "-n", "1", "--grace", "soon", "true"}, "--grace: 'soon' is not a whole number from 0 to 86400"},
      {{"launch", "-n", "1", "--log-dir", "l", "--tee", "3", "true"}, "--tee: '3' is not one of none, out, err, both"},
      {{"launch", "-n", "1", "--min-ranks", "1", "true"}, "--min-ranks requires --max-restarts"},
      {{"launch", "-n", "1", "--rdzv-endpoint", "a:1", "--main-process-ip", "b", "true"},
       "--rdzv-endpoint contradicts --main-process-ip; leave one of them out"},
      {{"launch", "-n", "2", "--record", "r", "--dry-run", "true"}, "--record contradicts --dry-run"},
      {{"launch", "-n", "2", "--dry-run", "--max-restarts", "1", "true"}, "--max-restarts contradicts --dry-run"},
      {{"launch", "-n", "70000", "--dry-run", "true"}, "--nproc-per-node 70000 is out of range: in a dry run, 1 to 65536 ranks"},
      {{"launch", "-n", "many", "true"}, "--nproc-per-node 'many' is not a number of ranks; write a number, or cpu for a rank on each of the"},
      {{"launch", "-n", "gpu", "true"}, "--nproc-per-node 'gpu' is not supported here"},
      {{"launch", "--standalone", "--nnodes", "2", "-n", "1", "true"}, "--standalone is for one node, but num_machines is 2"},
      {{"launch", "--standalone", "--rdzv-endpoint", "a:1", "-n", "1", "true"}, "contradicts"},
      {{"launch", "--nnodes", "1:4", "-n", "1", "true"},
       "--nnodes 1:4: a job begins with all its nodes; give their number, and --min-ranks"},
      {{"to-fsdp2"}, "give either --output-file FILE or --overwrite"},
      {{"to-fsdp2", "--overwrite", "--output-file", "f"}, "give either --output-file FILE or --overwrite"},
      {{"config", "default", "--set", "num_procs=2"}, "--set num_procs=2: there is no key 'num_procs' (did you mean num_processes?)"},
      {{"config", "update", "--set", "num_procs=2"}, "there is no key 'num_procs'"},
      {{"config", "explain", "--set", "use_fsdp=yes"}, "there is no key 'use_fsdp'"},
      {{"config", "--set", "num_procs=2"}, "there is no key 'num_procs'"},
      {{"config", "explain", "nowhere"}, "'nowhere' belongs to no flag (did you mean --config-file nowhere?)"},
      {{"config", "run.yaml"}, "there is no command 'run.yaml' (did you mean --config-file run.yaml?)"},
      {{"estimate-memory", "bert"}, "estimate-memory is refused: tessera plan MODEL -n RANKS"},
      {{"help", "lunch"}, "there is no command 'lunch' (did you mean launch?)"},
      {{"versions"}, "there is no command 'versions' (did you mean version?)"},
      {{"merge", "a", "b"}, "there is no command 'merge' (did you mean ckpt merge?)"},
      {{"consolidate"}, "there is no command 'consolidate' (did you mean ckpt consolidate?)"},
      {{"version", "--json"}, "there is no flag '--json'"},
      {{"launch", "-n=2", "true"}, "'-n=2' is not how flags are written; write -n 2 or --nproc-per-node=2"},
      {{"launch", "--nnodes", "0", "true"}, "(--nnodes): num_machines '0' is not a whole number from 1 to 65536"},
      {{"launch", "--mixed-precision", "bf17", "true"}, "mixed_precision 'bf17' is not one of no, fp16, bf16\n"},
  };
  for (const auto& line : wrong) {
    const auto ended = tessera(line.arguments);
    EXPECT_EQ(ended.status, 2) << ::testing::PrintToString(line);
    EXPECT_THAT(ended.err, AllOf(StartsWith("tessera: "), HasSubstr(line.says)));
  }
}

TEST(CommandLine, NamesTheFlagThatWasMeant) {
  const Line meant[] = {{{"launch", "--nprocs", "2", "true"}, "'--nprocs' (did you mean --nproc-per-node?)"},
                        {{"launch", "--nproc=2", "true"}, "'--nproc' (did you mean --nproc-per-node?)"},
                        {{"launch", "--num_procs", "2", "true"}, "(did you mean --num-processes?)"},
                        {{"launch", "-np", "2", "true"}, "'-np' (did you mean -n?)"},
                        {{"launch", "-nnodes", "2", "true"}, "'-nnodes' (did you mean --nnodes?)"},
                        {{"launch", "-config-fil=f", "true"}, "'-config-fil' (did you mean --config-file?)"},
                        {{"launch", "-N", "2", "true"}, "(did you mean -n?)"},
                        {{"launch", "--nodes", "2", "true"}, "(did you mean --nnodes?)"},
                        {{"launch", "--restarts", "2", "true"}, "(did you mean --max-restarts?)"},
                        {{"launch", "--config", "f", "true"}, "(did you mean --config-file?)"},
                        {{"launch", "--port", "1", "true"}, "(did you mean --master-port?)"},
                        {{"launch", "--precision", "bf16", "true"}, "(did you mean --mixed-precision?)"},
                        {{"launch", "--ranks", "2", "true"}, "(did you mean --nproc-per-node?)"},
                        {{"ckpt", "verify", "--prefix", "p"}, "(did you mean --ckpt-prefix?)"},
                        {{"ckpt", "reshard", "a", "b", "--ranks", "3"}, "'--ranks' (did you mean --world?)"},
                        {{"ckpt", "reshard", "a", "b", "-n", "3"}, "(did you mean --world?)"},
                        {{"ckpt", "reshard", "a", "b", "--first-notes"}, "(did you mean --notes-of-first-rank?)"},
                        {{"ckpt", "reshard", "a", "b", "--first-rank"}, "there is no flag '--first-rank'; tessera ckpt reshard --help"},
                        {{"test", "--world", "2"}, "(did you mean --ranks?)"},
                        {{"--verison"}, "(did you mean --version?)"}};
  for (const auto& line : meant) {
    const auto ended = tessera(line.arguments);
    EXPECT_EQ(ended.status, 2) << ::testing::PrintToString(line);
    EXPECT_THAT(ended.err, HasSubstr(line.says)) << ::testing::PrintToString(line);
  }
}

/// Checks the help of a command and of all commands below it. Returns how many commands these are.
int expect_readable_help(const Command& command) {
  auto line = command;
  line.emplace_back("--help");
  std::istringstream help(tessera(line).out);
  int count = 1;
  bool of_commands = false, has_example = false;
  for (std::string text; std::getline(help, text);) {
    EXPECT_LE(text.size(), 80U) << text;
    has_example |= text == "Examples:";
    of_commands = text == "Commands:" || (of_commands && !text.empty());
    if (!of_commands || !text.starts_with("  ") || text.starts_with("   ")) continue;
    line.back() = text.substr(2, text.find(' ', 2) - 2);
    if (line.back() == "help") continue;  // `help` is a command of the program only
    count += expect_readable_help(line);
  }
  EXPECT_TRUE(has_example) << ::testing::PrintToString(command);
  return count;
}

TEST(CommandLine, HasHelpOfEightyColumnsWithExamples) {
  EXPECT_GE(expect_readable_help({}), 25);
}

TEST(CommandLine, HasHelpAndVersionAsCommands) {
  const auto version = tessera({"--version"}).out, help = tessera({"--help"}).out, launch = tessera({"launch", "--help"}).out;
  EXPECT_EQ(tessera({"version"}).out, version);
  for (const auto* listed : {"\n  help ", "\n  version "}) EXPECT_THAT(help, HasSubstr(listed));
  EXPECT_THAT(tessera({"x"}).err, HasSubstr("version, help"));
  EXPECT_EQ(tessera({"-V"}).out, version);
  EXPECT_EQ(tessera({"help"}).out, help);
  EXPECT_THAT(help, HasSubstr("-V, --version"));
  EXPECT_EQ(tessera({"help", "launch"}).out, launch);
  EXPECT_EQ(tessera({"help", "launch", "-n", "1", "echo", "started"}).out, launch);
  EXPECT_EQ(tessera({"ckpt", "help", "merge"}).out, tessera({"ckpt", "merge", "--help"}).out);
  EXPECT_EQ(tessera({"config", "help"}).out, tessera({"config", "--help"}).out);
  EXPECT_EQ(tessera({"help", "ckpt"}).out, tessera({"ckpt", "--help"}).out);
  EXPECT_EQ(tessera({"launch", "-n", "1", "echo", "help"}).out, "[rank 0] help\n");
}

TEST(CommandLine, NamesThePrefixOfAnInstallation) {
  const auto in_build = tessera({"--cmake-prefix"});
  EXPECT_EQ(in_build.status, 2);
  EXPECT_THAT(in_build.err, HasSubstr("bin/tessera is not installed with its CMake package: cmake --install BUILD --prefix FOLDER"));
}

TEST(Launch, TakesTheFlagsOfOtherLaunchers) {
  const Line with_remark[] = {{{"--rdzv-id", "7"}, "--rdzv-id has no effect: nodes of one job are those that meet at one --rdzv-endpoint"},
                              {{"--rdzv_conf", "timeout=9"}, "--rdzv-conf has no effect: nodes meet in Tessera's own store"},
                              {{"--monitor_interval=3"}, "--monitor-interval has no effect: launch is told at once"},
                              {{"--role", "trainer"}, "--role has no effect: all ranks have the same role"},
                              {{"--start-method", "fork"}, "--start-method has no effect: ranks are programs"},
                              {{"--signals-to-handle", "SIGTERM"}, "--signals-to-handle has no effect: launch passes on"}};
  for (const auto& line : with_remark) {
    Command command = {"launch", "-n", "1"};
    command.insert(command.end(), line.arguments.begin(), line.arguments.end());
    command.emplace_back("true");
    const auto ended = tessera(command);
    EXPECT_EQ(ended.status, 0) << ended.err;
    EXPECT_THAT(ended.err, HasSubstr(std::string("launch: ") + line.says));
  }
  for (const auto* flag : {"--standalone", "--no_python", "--use_parallelism_config", "--shutdown-timeout=5"}) {
    const auto ended = tessera({"launch", flag, "-n", "1", "true"});
    EXPECT_EQ(ended.status, 0) << ended.err;
    EXPECT_THAT(ended.err, Not(HasSubstr("no effect"))) << flag;
  }
  const auto all = tessera({"launch", "-n", "cpu", "sh", "-c", "echo $WORLD_SIZE"});
  EXPECT_THAT(all.out, HasSubstr("[rank 0] " + std::to_string(lines(all.out).size()) + "\n"));
  EXPECT_EQ(lines(tessera({"launch", "--nproc_per_node=auto", "sh", "-c", "echo $WORLD_SIZE"}).out).size(), lines(all.out).size());
}

TEST(Launch, SaysWhyItRefusesFlagsOfOtherLaunchers) {
  const std::pair<const char*, const char*> refused[] = {
      {"-m", "launch starts programs, not modules or functions of Python; write tessera launch -n N python -m"},
      {"--module", "python -m MODULE"},
      {"--use_deepspeed", "Tessera shards by FSDP"},
      {"--deepspeed_config_file=f", "by --config-file"},
      {"--zero_stage=3", "DeepSpeed is a Python library"},
      {"--fp8_backend=te", "libtorch has no fp8 training in C++"},
      {"--megatron_lm_tp_degree=2", "use FSDP"},
      {"--tpu_cluster", "starts no TPU pods"},
      {"--redirects=3", "--log-dir FOLDER keeps"},
      {"--numa-binding=node", "--enable-cpu-affinity true"},
      {"--mpirun_hostfile=f", "does not start mpirun"},
      {"--world-size=2", "write --nproc-per-node"}};
  for (const auto& [flag, reason] : refused) {
    const auto ended = tessera({"launch", flag, "-n", "1", "true"});
    EXPECT_EQ(ended.status, 2) << flag;
    EXPECT_THAT(ended.err, AllOf(HasSubstr(" is refused: "), HasSubstr(reason))) << flag;
  }
}

TEST(Launch, IsQuietIfItShall) {
  const Folder folder;
  for (const auto* flag : {"-q", "--quiet"}) {
    const auto ended = tessera(
        {"launch", flag, "-n", "2", "--mixed-precision", "bf16", "--role", "r", "--log-dir", folder.path(), "sh", "-c", "echo $RANK"});
    EXPECT_EQ(ended.status, 0);
    EXPECT_EQ(ended.err, "");
  }
  EXPECT_FALSE(std::filesystem::is_empty(folder.path()));
  EXPECT_THAT(tessera({"launch", "-q", "-n", "1", "false"}).err, StartsWith("launch: rank 0 ended with status 1"));
}

TEST(TestCommand, PrintsNoErrorThatItHasProvoked) {
  for (const auto* transport : {"self", "threads", "shm", "fake"}) {
    const auto ended = tessera({"test", "--transport", transport});
    EXPECT_EQ(ended.status, 0);
    EXPECT_EQ(ended.err, "") << transport;
    EXPECT_THAT(ended.out, HasSubstr("all transports keep their promises"));
  }
}

}  // namespace
}  // namespace tessera::testing::command_line_test
