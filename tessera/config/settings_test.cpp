#include "tessera/config/settings.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <list>
#include <regex>

#include "tessera/base/env_table.h"
#include "tessera/base/error.h"
#include "tests/testing/folder.h"

namespace tessera::testing::settings_test {
namespace {

using config::Origin;
using config::Settings;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

/// The configuration in Accelerate's guide.
std::string guide_text() {
  return read_file(TESSERA_ROOT "/tests/recipes/accelerate.yaml");
}

class Files : public ::testing::Test {
 protected:
  Settings read(const std::string& text, const std::string& name = "c.yaml") const {
    write_file(folder_ / name, text);
    Settings settings;
    settings.read_file(folder_ / name);
    return settings;
  }
  /// The error of reading the file, without the folder of the file.
  std::string error(const std::string& text) const {
    try {
      read(text).expect_consistent();
    } catch (const ConfigError& error) {
      const std::string message = error.what(), folder = folder_.path().string() + "/";
      return message.starts_with(folder) ? message.substr(folder.size()) : message;
    }
    return "no error came";
  }
  std::vector<std::string> remarks(const std::string& text) const {
    auto found = read(text).remarks();
    for (auto& remark : found) remark = remark.substr(folder_.path().string().size() + 1);
    return found;
  }

  Folder folder_;
};

/// Sets a variable as long as the object lives.
class Set {
 public:
  Set(const char* name, const char* value) : name_(name) { ::setenv(name, value, 1); }
  Set(const Set&) = delete;
  Set& operator=(const Set&) = delete;
  ~Set() { ::unsetenv(name_); }

 private:
  const char* name_;
};

template <class Act>
std::string config_error(const Act& act) {
  try {
    act();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error came";
}

TEST_F(Files, MayHaveLostTheirIndentation) {
  for (const auto& text : {guide_text(), std::regex_replace(guide_text(), std::regex("\n +"), "\n")}) {
    const auto settings = read(text);
    settings.expect_consistent();
    EXPECT_EQ(settings.text("fsdp_auto_wrap_policy"), "TRANSFORMER_BASED_WRAP");
    EXPECT_EQ(settings.text("fsdp_transformer_layer_cls_to_wrap"), "BertLayer");
    EXPECT_EQ(settings.sharding_strategy(), "FULL_SHARD");
    EXPECT_EQ(settings.text("mixed_precision"), "bf16");
    EXPECT_EQ(settings.integer("num_processes"), 2);
    EXPECT_TRUE(settings.is_true("fsdp_cpu_ram_efficient_loading"));
    EXPECT_EQ(settings.setting("fsdp_backward_prefetch").where, (folder_ / "c.yaml").string() + ":7");
    EXPECT_THAT(settings.remarks(), IsEmpty());
    EXPECT_THAT(settings.environment(),
                AllOf(Contains(Pair("FSDP_TRANSFORMER_CLS_TO_WRAP", "BertLayer")), Contains(Pair("ACCELERATE_USE_FSDP", "true")),
                      Contains(Pair("FSDP_BACKWARD_PREFETCH", "BACKWARD_PRE")), Contains(Pair("ACCELERATE_MIXED_PRECISION", "bf16"))));
  }
}

TEST_F(Files, NameUnknownKeysWithTheNearest) {
  EXPECT_EQ(error("num_procesess: 2\n"), "c.yaml:1: there is no key 'num_procesess' (did you mean num_processes?)");
  EXPECT_EQ(error("debug: false\nfsdp_config:\n  fsdp_versoin: 2\n"),
            "c.yaml:3: there is no key 'fsdp_versoin' (did you mean fsdp_version?)");
  EXPECT_EQ(error("fsdp_config:\n  shading_strategy: 1\n"),
            "c.yaml:2: there is no key 'shading_strategy' (did you mean fsdp_sharding_strategy?)");
  EXPECT_THAT(error("tea: 2\n"), HasSubstr("c.yaml:1: there is no key 'tea'"));
  EXPECT_EQ(error("fsdp_config:\n  mixed_precision: no\n"),
            "c.yaml:2: there is no key 'mixed_precision' here (mixed_precision belongs at the top of the file)");
  EXPECT_EQ(error("fsdp_version: 2\n"), "c.yaml:1: fsdp_version belongs under fsdp_config");
  EXPECT_EQ(error("fsdp_config:\n  fsdp_version: 1\nfsdp_offload_params: true\n"),
            "c.yaml:3: fsdp_offload_params belongs under fsdp_config");
}

TEST_F(Files, AddThePrefixOfASection) {
  const auto settings = read("fsdp_config: {version: 2, reshard_after_forward: no}\nparallelism_config:\n  dp_shard_size: 2\n");
  EXPECT_EQ(settings.text("fsdp_version"), "2");
  EXPECT_EQ(settings.sharding_strategy(), "SHARD_GRAD_OP");
  EXPECT_EQ(settings.integer("parallelism_config_dp_shard_size"), 2);
}

TEST_F(Files, HaveEachKeyOnce) {
  EXPECT_EQ(error("debug: false\ndebug: true\n"), "c.yaml:2: the key 'debug' is there twice");
  EXPECT_THAT(error("fsdp_config:\n  fsdp_version: 1\n  version: 1\n"),
              AllOf(HasSubstr("c.yaml:3: fsdp_version is there already"), HasSubstr("c.yaml:2")));
  EXPECT_THAT(error("fsdp_config:\n  backward_prefetch: NO_PREFETCH\n  fsdp_backward_prefetch_policy: BACKWARD_PRE\n"),
              HasSubstr("c.yaml:3: fsdp_backward_prefetch_policy is there already"));
}

TEST_F(Files, MayCallThingsByOtherNames) {
  EXPECT_EQ(read("mixed_precision: no\ndowncast_bf16: no\n").text("mixed_precision"), "no");
  EXPECT_EQ(read("mixed_precision: false\ndowncast_bf16: False\n").text("mixed_precision"), "no");
  EXPECT_EQ(read("mixed_precision: BF16\n").text("mixed_precision"), "bf16");
  EXPECT_EQ(read("use_cpu: Yes\n").text("use_cpu"), "true");
  EXPECT_EQ(read("fp16: true\n").text("mixed_precision"), "fp16");
  EXPECT_EQ(read("fp16: true\nmixed_precision: bf16\n").text("mixed_precision"), "bf16");
  EXPECT_EQ(read("fsdp_config: {fsdp_min_num_params: 1e8}\n").integer("fsdp_min_num_params"), 100'000'000);
  EXPECT_EQ(read("fsdp_config: {fsdp_transformer_layer_cls_to_wrap: [A, B]}\n").text("fsdp_transformer_layer_cls_to_wrap"), "A,B");
  EXPECT_EQ(read("gpu_ids: 0,1\n").text("gpu_ids"), "0,1");
  EXPECT_EQ(read("dynamo_backend: 'NO'\ngpu_ids: null\ntpu_env: ['']\n").text("gpu_ids"), "all");
  const char* const strategies[] = {"FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"};
  for (int i = 0; i < 5; i++) {
    EXPECT_EQ(read("fsdp_config: {fsdp_sharding_strategy: " + std::to_string(i + 1) + "}\n").sharding_strategy(), strategies[i]);
  }
  EXPECT_THAT(error("fsdp_config: {fsdp_sharding_strategy: 6}\n"), HasSubstr("fsdp_sharding_strategy '6' is not one of FULL_SHARD, "));
}

TEST_F(Files, AreRefusedWithTheReason) {
  EXPECT_THAT(error("mixed_precision: fp8\n"),
              HasSubstr("c.yaml:1: mixed_precision 'fp8' is not one of no, fp16, bf16: libtorch has no fp8"));
  for (const auto* wrong : {"mixed_precision: bf17\n", "compute_environment: LOCAL\n"})
    EXPECT_THAT(error(wrong), AllOf(HasSubstr(" is not "), Not(HasSubstr("fp8")), Not(HasSubstr("SageMaker"))));
  EXPECT_THAT(error("base_job_name: x\ncompute_environment: AMAZON_SAGEMAKER\n"),
              HasSubstr("c.yaml:2: compute_environment 'AMAZON_SAGEMAKER'"));
  EXPECT_THAT(error("tpu_use_cluster: true\n"), HasSubstr("tpu_use_cluster 'true' is refused: Tessera starts no TPU pods"));
  EXPECT_THAT(error("tpu_env: [A=1]\n"), HasSubstr("tpu_env 'A=1' is refused"));
  EXPECT_THAT(error("fp8_config: {backend: TE}\n"), HasSubstr("fp8_config '{...}' is refused"));
  EXPECT_THAT(error("dynamo_config: {dynamo_backend: INDUCTOR}\n"), HasSubstr("dynamo_backend 'INDUCTOR' is refused: C++ modules"));
  EXPECT_THAT(error("parallelism_config: {parallelism_config_tp_size: 2}\n"), HasSubstr("parallelism_config_tp_size '2' is refused"));
  EXPECT_THAT(error("distributed_type: MEGATRON_LM\n"), HasSubstr("distributed_type 'MEGATRON_LM' is not one of NO, "));
  EXPECT_THAT(error("num_processes: 0\n"), HasSubstr("num_processes '0' is not a whole number from 1 on"));
  EXPECT_THAT(error("num_processes: 2.5\n"), HasSubstr("num_processes '2.5' is not"));
  EXPECT_THAT(error("num_processes: [1, 2]\n"), HasSubstr("c.yaml:1: num_processes has several values"));
  EXPECT_THAT(error("debug: maybe\n"), HasSubstr("debug 'maybe' is not true or false"));
}

TEST_F(Files, ThatAreNoneSayWhy) {
  EXPECT_THAT(error(""), HasSubstr("has no keys"));
  EXPECT_THAT(error("- a\n"), HasSubstr("has no keys"));
  EXPECT_THAT(error("debug: [\n\n"), HasSubstr("is neither YAML nor JSON"));
  EXPECT_THAT(error("debug: true\n  use_cpu: [}"), HasSubstr("c.yaml:2 is neither YAML nor JSON"));
  EXPECT_THAT(error("debug: true\nfsdp_config:\n\tfsdp_version: 2\n"),
              HasSubstr(" (a tab indents line 3; YAML allows only spaces there)"));
  EXPECT_THAT(error(std::string(1000, '[')), HasSubstr("c.yaml"));
  for (const auto* wrong : {"a: &a [*a]\n", "a: &a {<<: *a}\n", "a: &a {b: [{c: *a}]}\n"})
    EXPECT_THAT(error(wrong), HasSubstr("c.yaml:1: a value contains itself")) << wrong;
  for (const auto* tagged : {"!!python/name:os.system", "!!python/object/apply:os.system [ls]", "!!timestamp 2026-01-01", "!mine x"})
    EXPECT_THAT(error(std::string("debug: true\nmain_training_function: ") + tagged + "\n"),
                HasSubstr("c.yaml:2: the tag " + std::string(tagged).substr(0, std::string(tagged).find(' ')) + " is refused"));
  EXPECT_THAT(error("debug: true\n---\ndebug: true\n"), HasSubstr("more than one document"));
  EXPECT_THAT(error("{debug: true} {}"), HasSubstr("c.yaml"));
  EXPECT_THAT(error(",n]ulnull"), HasSubstr("c.yaml"));
  EXPECT_THAT(error(std::string(2 << 20, '#')), HasSubstr("too large"));
  EXPECT_THAT(error("fsdp_config: 3\n"), HasSubstr("fsdp_config is not a section"));
  EXPECT_THAT(error("main_training_function: \"a\\nb\"\n"), HasSubstr("control character"));
  Settings settings;
  EXPECT_THROW(settings.read_file(folder_ / "missing.yaml"), IoError);
  EXPECT_THROW(settings.read_file(folder_.path()), IoError);
}

TEST_F(Files, MayBeJson) {
  const auto settings =
      read("{\n\t\"distributed_type\": \"FSDP\",\n\t\"fsdp_config\": {\"fsdp_version\": 2},\n\t\"gpu_ids\": null, \"use_cpu\": true\n}\n",
           "c.json");
  EXPECT_EQ(settings.text("fsdp_version"), "2");
  EXPECT_TRUE(settings.is_true("use_cpu"));
}

TEST_F(Files, SayWhatHasNoEffect) {
  EXPECT_THAT(remarks("distributed_type: MULTI_CPU\nsame_network: false\ndebug: true\nfsdp_config: {fsdp_version: 1}\nnum_processes: -1\n"),
              UnorderedElementsAre(HasSubstr("c.yaml:2: same_network false has no effect"), HasSubstr("c.yaml:3: debug true has no"),
                                   HasSubstr("c.yaml:5: num_processes -1"), HasSubstr("c.yaml:4: fsdp_config shards nothing")));
}

TEST_F(Files, AreWrittenSortedAndReadAgain) {
  const auto settings = read(guide_text());
  const auto text = to_yaml(settings);
  EXPECT_THAT(
      text, HasSubstr("distributed_type: FSDP\ndowncast_bf16: 'no'\nenable_cpu_affinity: false\nfsdp_config:\n  fsdp_auto_wrap_policy: "));
  EXPECT_EQ(to_yaml(read(text)), text);
  Settings other;
  other.set("gpu_ids", "0,1", Origin::Flag, "a");
  other.set("fsdp_ignored_modules", "it's .*: x", Origin::Flag, "b");
  other.set("fsdp_transformer_layer_cls_to_wrap", "No", Origin::Flag, "b");
  EXPECT_THAT(to_yaml(other), AllOf(HasSubstr("gpu_ids: '0,1'\n"), HasSubstr("'it''s .*: x'\n"), HasSubstr("_wrap: 'No'\n")));
  EXPECT_EQ(read(to_yaml(other)).text("fsdp_ignored_modules"), "it's .*: x");
}

TEST(Settings, LaterOriginsWin) {
  Settings settings;
  EXPECT_FALSE(settings.is_set("mixed_precision"));
  settings.set("mixed_precision", "bf16", Origin::Flag, "--mixed-precision");
  settings.set("mixed_precision", "fp16", Origin::File, "c.yaml:3");
  EXPECT_EQ(settings.setting("mixed_precision").where, "--mixed-precision");
  settings.set("mixed_precision", "no", Origin::Code, "TrainerOptions");
  EXPECT_EQ(settings.text("mixed_precision"), "no");
  EXPECT_THAT(config_error([&] { settings.set("mixed_precison", "no", Origin::Flag, "--mixed-precison"); }),
              HasSubstr("--mixed-precison: there is no key 'mixed_precison' (did you mean mixed_precision?)"));
  EXPECT_THAT(config_error([&] { settings.set("debug", "x", Origin::Flag, "--debug"); }), "--debug: debug 'x' is not true or false");
  EXPECT_THROW((void)settings.text("tea"), UsageError);
}

TEST_F(Files, HaveTheNumbersOfYaml) {
  for (const auto* other :
       {"010", "0x2", "1_0", "0b11", "1:30", "-1_0", "1_000.5", "1:30.5", "+01:05.25", "!!int 010", "!!float '1_0.5'"}) {
    EXPECT_THAT(error(std::string("gradient_clipping: ") + other + "\n"), HasSubstr("c.yaml:1: ")) << other;
    EXPECT_THAT(error(std::string("gradient_clipping: ") + other + "\n"), HasSubstr(" is a number that is not written in decimal"))
        << other;
  }
  const std::pair<const char*, double> decimal[] = {{".5", 0.5}, {"1.", 1}, {"1.0e+3", 1000}, {"0.25", 0.25}, {"0", 0}, {"7", 7}};
  for (const auto& [text, value] : decimal)
    EXPECT_EQ(read(std::string("gradient_clipping: ") + text + "\n").number("gradient_clipping"), value);
  for (const auto* text : {"0x", "_1", "0o10", "1:60", "'0x2'", "+3"})
    EXPECT_THAT(error(std::string("num_processes: ") + text + "\n"), HasSubstr(" is not a whole number")) << text;
  for (const auto* text : {"10.0.0.1", "fe80::1", "_", "1::2"})
    EXPECT_EQ(read(std::string("main_process_ip: ") + text + "\n").text("main_process_ip"), text);
  EXPECT_EQ(read("main_process_ip: '010'\n").text("main_process_ip"), "010");
  EXPECT_EQ(read("main_process_ip: !!str 010\n").text("main_process_ip"), "010");
}

TEST_F(Files, HaveMergeKeys) {
  const std::string base = "fsdp_config: &base\n  fsdp_version: 1\n  fsdp_min_num_params: 7\n";
  const auto sizes = [&](const std::string& text) { return read("num_processes: 6\n" + text); };
  const auto settings = sizes(
      "parallelism_config: {<<: {parallelism_config_dp_replicate_size: 2, parallelism_config_dp_shard_size: 9},"
      " parallelism_config_dp_shard_size: 3}\n");
  EXPECT_EQ(settings.text("parallelism_config_dp_replicate_size"), "2");
  EXPECT_EQ(settings.text("parallelism_config_dp_shard_size"), "3");
  EXPECT_EQ(sizes("fsdp_config:\n  <<: [{min_num_params: 1}, {min_num_params: 2, version: 2}]\n").text("fsdp_min_num_params"), "1");
  EXPECT_EQ(sizes("fsdp_config: {<<: {min_num_params: 1}, <<: {min_num_params: 2}}\n").text("fsdp_min_num_params"), "2");
  EXPECT_EQ(sizes(base + "<<: {mixed_precision: bf16}\n").text("mixed_precision"), "bf16");
  EXPECT_EQ(sizes("mixed_precision: fp16\n<<: {mixed_precision: bf16}\n").text("mixed_precision"), "fp16");
  EXPECT_EQ(sizes("fsdp_config:\n  <<: &a {min_num_params: 1}\n<<: [{debug: no}, {use_cpu: yes}]\n").text("use_cpu"), "true");
  EXPECT_THAT(error(base + "dynamo_config:\n  <<: *base\n"), HasSubstr("c.yaml:2: there is no key 'fsdp_version' here"));
  for (const auto* wrong : {"<<: 3\n", "<<: [1]\n", "<<:\n"})
    EXPECT_THAT(error(wrong), HasSubstr(": << needs a map or a list of maps")) << wrong;
  EXPECT_THAT(error("'<<': 3\n"), HasSubstr("there is no key '<<'"));
}

TEST_F(Files, SayWhatAnEmptyNumberOfRanksMeans) {
  EXPECT_THAT(remarks("num_processes:\nmixed_precision: bf16\n"),
              ElementsAre("c.yaml:1: num_processes without a value leaves the number to the command line"));
  EXPECT_THAT(remarks("num_processes: -1\n"), ElementsAre("c.yaml:1: num_processes -1 leaves the number to the command line"));
}

TEST(Settings, NameVariablesThatAreMistyped) {
  const std::pair<const char*, const char*> mistyped[] = {{"FSDP_SHARDING_STRATEG", "FSDP_SHARDING_STRATEGY"},
                                                          {"FSDP_TRANSFORMER_LAYER_CLS_TO_WRAP", "FSDP_TRANSFORMER_CLS_TO_WRAP"},
                                                          {"FSDP_BACKWARD_PREFETCH_POLICY", "FSDP_BACKWARD_PREFETCH"},
                                                          {"ACCELERATE_MIXED_PRECISON", "ACCELERATE_MIXED_PRECISION"},
                                                          {"PARALLELISM_CONFIG_DP_SHARD_SIZ", "PARALLELISM_CONFIG_DP_SHARD_SIZE"}};
  for (const auto& [name, meant] : mistyped) {
    const Set set(name, "1");
    Settings settings;
    settings.read_environment();
    EXPECT_THAT(settings.remarks(),
                ElementsAre(HasSubstr(std::string(name) + ", which Tessera does not read (did you mean " + meant + "?)")));
  }
  for (const auto* theirs : {"ACCELERATE_USE_XPU", "ACCELERATE_DYNAMO_MODE", "PARALLELISM_CONFIG_CP_BACKEND", "ACCELERATE_LOG_LEVEL",
                             "FSDP_VERSION", "SOMEBODY_FSDP_VERSIO"}) {
    const Set set(theirs, "1");
    Settings settings;
    settings.read_environment();
    EXPECT_THAT(settings.remarks(), IsEmpty()) << theirs;
  }
}

TEST(Settings, HaveVariablesOfTheTableOfVariables) {
  for (const auto& key : config::keys()) EXPECT_TRUE(is_known_env(key.variable)) << key.variable;
}

TEST(Settings, GoThroughTheEnvironment) {
  EXPECT_THAT(Settings().environment(), IsEmpty());
  Settings sent;
  sent.set("fsdp_min_num_params", "1e6", Origin::Flag, "-");
  sent.set("distributed_type", "MULTI_CPU", Origin::Flag, "-");
  sent.set("num_processes", "4", Origin::Flag, "-");
  sent.set("gradient_clipping", "1.5", Origin::Flag, "-");
  const auto variables = sent.environment();
  EXPECT_THAT(variables, UnorderedElementsAre(Pair("FSDP_MIN_NUM_PARAMS", "1000000"), Pair("ACCELERATE_USE_FSDP", "false"),
                                              Pair("ACCELERATE_GRADIENT_CLIPPING", "1.5"), Pair("TESSERA_SETTINGS_FROM", HasSubstr("-"))));
  Settings received;
  {
    std::list<Set> set;
    for (const auto& [name, value] : variables) set.emplace_back(name.c_str(), value.c_str());
    received.read_environment();
  }
  EXPECT_EQ(received.integer("fsdp_min_num_params"), 1'000'000);
  EXPECT_EQ(received.text("distributed_type"), "MULTI_CPU");
  EXPECT_EQ(received.number("gradient_clipping"), 1.5);
  const Set wrong("FSDP_VERSION", "3");
  EXPECT_EQ(config_error([&] { received.read_environment(); }), "FSDP_VERSION: fsdp_version '3' is not one of 1, 2");
}

TEST(Settings, KeepTheirOriginsInTheEnvironment) {
  Settings sent;
  sent.set("fsdp_version", "2", Origin::File, "/a b/c.yaml:7");
  sent.set("tessera_layout", "rows", Origin::Flag, "--tessera-layout");
  sent.set("mixed_precision", "bf16", Origin::Environment, "ACCELERATE_MIXED_PRECISION");
  sent.set("tessera_max_live_units", "3", Origin::Flag, "odd\tplace");
  sent.set("tessera_prefetch_depth", "2", Origin::Flag, "--tessera-prefetch-depth");
  const auto variables = sent.environment();
  std::list<Set> set;
  for (const auto& [name, value] : variables) set.emplace_back(name.c_str(), value.c_str());
  const Set changed("TESSERA_PREFETCH_DEPTH", "3");  // set by a script between launch and the rank
  Settings received;
  received.read_environment();
  const auto origin = [&](const char* key) { return std::pair(received.setting(key).origin, received.setting(key).where); };
  EXPECT_EQ(origin("fsdp_version"), std::pair(Origin::File, std::string("/a b/c.yaml:7")));
  EXPECT_EQ(origin("tessera_layout"), std::pair(Origin::Flag, std::string("--tessera-layout")));
  EXPECT_EQ(origin("mixed_precision"), std::pair(Origin::Environment, std::string("ACCELERATE_MIXED_PRECISION")));
  EXPECT_EQ(origin("tessera_max_live_units"), std::pair(Origin::Environment, std::string("TESSERA_MAX_LIVE_UNITS")));
  EXPECT_EQ(origin("tessera_prefetch_depth"), std::pair(Origin::Environment, std::string("TESSERA_PREFETCH_DEPTH")));
  for (const auto* nonsense : {"FSDP_VERSION", "FSDP_VERSION\t2\n\t\n", "\t\t\t\t\n"}) {
    const Set broken("TESSERA_SETTINGS_FROM", nonsense);
    Settings other;
    other.read_environment();
    EXPECT_EQ(other.setting("fsdp_version").where, "FSDP_VERSION");
  }
}

TEST(Settings, UnderstandWhatAccelerateGivesItsRanks) {
  // Accelerate passes the key of the file and sets the other key to a default that nobody wrote.
  const auto strategy = [](const char* version, const char* strategy, const char* reshard) {
    const Set use("ACCELERATE_USE_FSDP", "true"), one("FSDP_VERSION", version), two("FSDP_SHARDING_STRATEGY", strategy),
        three("FSDP_RESHARD_AFTER_FORWARD", reshard);
    Settings settings;
    settings.read_environment();
    settings.expect_consistent();
    return settings.sharding_strategy();
  };
  EXPECT_EQ(strategy("1", "FULL_SHARD", "shard_grad_op"), "SHARD_GRAD_OP");
  EXPECT_EQ(strategy("1", "HYBRID_SHARD", "true"), "HYBRID_SHARD");
  EXPECT_EQ(strategy("1", "SHARD_GRAD_OP", "true"), "SHARD_GRAD_OP");
  EXPECT_EQ(strategy("2", "FULL_SHARD", "false"), "SHARD_GRAD_OP");
  EXPECT_EQ(strategy("2", "FULL_SHARD", "true"), "FULL_SHARD");
}

TEST_F(Files, ThatContradictThemselvesAreRefused) {
  EXPECT_THAT(error("fsdp_config: {cpu_ram_efficient_loading: true, sync_module_states: false}\n"),
              HasSubstr("needs fsdp_sync_module_states true"));
  EXPECT_THAT(error("fsdp_config: {sharding_strategy: FULL_SHARD, reshard_after_forward: SHARD_GRAD_OP}\n"),
              HasSubstr("leave one of them out"));
  EXPECT_THAT(error("fsdp_config: {fsdp_transformer_layer_cls_to_wrap: A}\n"),
              HasSubstr("needs fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP; it is NO_WRAP"));
  EXPECT_THAT(error("fsdp_config: {fsdp_version: 2, fsdp_state_dict_type: LOCAL_STATE_DICT}\n"), HasSubstr("is of fsdp_version 1"));
  EXPECT_THAT(error("num_machines: 2\nmachine_rank: 2\n"), HasSubstr("c.yaml:2: machine_rank 2 is not below num_machines 2"));
  EXPECT_THAT(error("num_machines: 2\nnum_processes: 3\n"), HasSubstr("can't be divided"));
  EXPECT_THAT(error("num_processes: 6\nparallelism_config: {dp_replicate_size: 2, dp_shard_size: 2}\n"),
              HasSubstr("is 4, but there are 6 ranks"));
  EXPECT_THAT(error("distributed_type: MULTI_GPU\nuse_cpu: true\n"), HasSubstr("use_cpu true contradicts"));
  EXPECT_THAT(error("use_cpu: true\nfsdp_config: {fsdp_offload_params: true}\n"), HasSubstr("c.yaml:1: use_cpu true contradicts"));
  for (const auto* classes : {"'2'", "'A, 2'", "',A'"}) {
    EXPECT_THAT(error(fmt::format("fsdp_config: {{auto_wrap_policy: TRANSFORMER_BASED_WRAP, transformer_layer_cls_to_wrap: {}}}\n", classes)),
                HasSubstr("is not the names of classes with commas between"))
        << classes;
  }
  EXPECT_THAT(error("fsdp_config: {fsdp_ignored_modules: '(head'}\n"), HasSubstr("c.yaml:1: fsdp_ignored_modules '(head' is not a regular"));
  EXPECT_THAT(error("gpu_ids: 0;1\n"), HasSubstr("c.yaml:1: gpu_ids '0;1' is neither all nor numbers"));
}

TEST_F(Files, HaveASectionOfTesseraItself) {
  const auto settings =
      read("tessera_config:\n  layout: Rows\n  tessera_max_live_units: 3\n  limit_all_gathers: no\n  log_with: [a.jsonl, b/]\n");
  EXPECT_EQ(settings.text("tessera_layout"), "rows");
  EXPECT_EQ(settings.setting("tessera_layout").where, (folder_ / "c.yaml:2").string());
  EXPECT_EQ(settings.integer("tessera_max_live_units"), 3);
  EXPECT_FALSE(settings.is_true("tessera_limit_all_gathers"));
  EXPECT_EQ(settings.text("tessera_log_with"), "a.jsonl,b/");
  EXPECT_THAT(to_yaml(settings), HasSubstr("\ntessera_config:\n  tessera_layout: rows\n  tessera_limit_all_gathers: false\n"));
  EXPECT_EQ(to_yaml(read(to_yaml(settings))), to_yaml(settings));
  EXPECT_EQ(to_json(read(to_json(settings), "c.json")), to_json(settings));
  EXPECT_THAT(to_yaml(Settings()), Not(HasSubstr("tessera")));
  EXPECT_THAT(error("tessera_config: {layuot: rows}\n"), HasSubstr("c.yaml:1: there is no key 'layuot' (did you mean tessera_layout?)"));
  EXPECT_THAT(error("tessera_config: {layout: 2}\n"), HasSubstr("tessera_layout '2' is not one of auto, flat, rows, whole-parameters"));
  EXPECT_THAT(error("tessera_layout: rows\n"), HasSubstr("c.yaml:1: tessera_layout belongs under tessera_config"));
  EXPECT_THAT(error("fsdp_config: {tessera_layout: rows}\n"),
              HasSubstr("there is no key 'tessera_layout' here (tessera_layout belongs under tessera_config)"));
  EXPECT_THAT(error("fsdp_config: {residence: gathered}\n"), HasSubstr("no key 'residence' here (tessera_residence belongs under"));
  EXPECT_THAT(error("residence: gathered\n"), HasSubstr("no key 'residence' here (tessera_residence belongs under tessera_config)"));
  EXPECT_THAT(error("tessera_config: {mixed_precision: bf16}\n"), HasSubstr("here (mixed_precision belongs at the top of the file)"));
  EXPECT_THAT(error("tessera_config: {log_with: ['a,b.jsonl']}\n"),
              HasSubstr("c.yaml:1: 'a,b.jsonl' in the list tessera_log_with has a comma"));
  for (const auto* key : {"reshard_ranks", "prefetch_depth"})
    EXPECT_THAT(error(fmt::format("tessera_config: {{{}: 4294967298}}\n", key)), HasSubstr("is not a whole number from 0 to 65536"));
  EXPECT_THAT(error(R"({"zero_optimization": {"stage": 3}, "tessera_config": {"residence": "gathered"}})"),
              HasSubstr("tessera_config has no place in a file of DeepSpeed"));
  const auto plain = config::for_accelerate(settings);
  EXPECT_THAT(to_yaml(plain), Not(HasSubstr("tessera")));
  EXPECT_THAT(plain.remarks(), ::testing::SizeIs(4));
  EXPECT_THAT(plain.remarks(), Contains(HasSubstr("c.yaml:2: tessera_layout rows is Tessera's own, and left out")));
}

TEST_F(Files, ThatContradictThemselvesInThatSectionAreRefused) {
  const std::pair<const char*, const char*> wrong[] = {
      {"mixed_precision: bf16\ntessera_config: {codec: bf16}\n", "c.yaml:2: tessera_codec bf16 contradicts mixed_precision bf16 ("},
      {"fsdp_config: {offload_params: true}\ntessera_config: {offload: disk}\n",
       "tessera_offload disk contradicts fsdp_offload_params true ("},
      {"fsdp_config: {offload_params: true}\ntessera_config: {offload: none}\n",
       "tessera_offload none contradicts fsdp_offload_params true ("},
      {"tessera_config: {offload: disk, residence: node-shared}\n", "tessera_residence node-shared contradicts tessera_offload disk ("},
      {"tessera_config: {layout: rows}\nfsdp_config: {use_orig_params: no}\n",
       "tessera_layout rows contradicts fsdp_use_orig_params false ("},
      {"tessera_config: {reshard_ranks: 2}\nfsdp_config: {sharding_strategy: SHARD_GRAD_OP}\n",
       "tessera_reshard_ranks 2 contradicts fsdp_sharding_strategy SHARD_GRAD_OP ("},
      {"tessera_config: {reshard_ranks: 2}\nfsdp_config: {version: 2, reshard_after_forward: no}\n",
       "tessera_reshard_ranks 2 contradicts fsdp_"},
      {"tessera_config: {reshard_ranks: 2}\ndistributed_type: MULTI_CPU\n", "contradicts distributed_type MULTI_CPU ("},
      {"tessera_config: {transport: gloo}\ndistributed_type: XLA\n", "tessera_transport gloo contradicts distributed_type XLA ("},
      {"tessera_config: {activation_keep: 'aten::mm'}\n",
       "tessera_activation_keep aten::mm needs fsdp_activation_checkpointing true; it is false (the default)"},
      {"distributed_type: MULTI_CPU\nfsdp_config: {activation_checkpointing: true}\ntessera_config: {activation_offload: disk}\n",
       "tessera_activation_offload disk needs distributed_type FSDP; it is MULTI_CPU ("},
      {"tessera_config: {prefetch_depth: 2, max_live_units: 1}\n", "tessera_prefetch_depth 2 contradicts tessera_max_live_units 1 ("},
      {"use_cpu: true\ndistributed_type: XLA\n", "use_cpu true contradicts distributed_type XLA ("},
      {"tessera_config: {offload_folder: /tmp}\n", "tessera_offload_folder /tmp needs tessera_offload disk; it is none (the default)"},
      {"tessera_config: {checkpoint_format: tessera}\nfsdp_config: {state_dict_type: FULL_STATE_DICT}\n",
       "tessera_checkpoint_format tessera contradicts fsdp_state_dict_type FULL_STATE_DICT ("},
      {"tessera_config: {checkpoint_format: accelerate}\nfsdp_config: {state_dict_type: LOCAL_STATE_DICT}\n",
       "tessera_checkpoint_format accelerate contradicts fsdp_state_dict_type LOCAL_STATE_DICT ("},
  };
  for (const auto& [text, why] : wrong) EXPECT_THAT(error(text), HasSubstr(why)) << text;
  for (const auto* right :
       {"fsdp_config: {offload_params: true}\ntessera_config: {offload: host}\n", "tessera_config: {offload: disk, offload_folder: a}\n",
        "fsdp_config: {activation_checkpointing: true}\ntessera_config: {activation_offload: disk, offload_folder: a}\n",
        "tessera_config: {layout: flat}\nfsdp_config: {use_orig_params: no}\n"})
    EXPECT_EQ(error(right), "no error came") << right;
}

TEST(Settings, SaveForAccelerateWhereThatIsAskedFor) {
  struct Case {
    const char* format;
    Origin format_origin;
    const char* layout;
    Origin layout_origin;
    bool expected;
  };
  using enum Origin;
  for (const auto& [format, format_origin, layout, layout_origin, expected] : {Case{"", Default, "", Default, false},
                                                                               {"", Default, "SHARDED_STATE_DICT", Environment, true},
                                                                               {"", Default, "FULL_STATE_DICT", File, true},
                                                                               {"", Default, "LOCAL_STATE_DICT", File, false},
                                                                               {"accelerate", File, "", Default, true},
                                                                               {"tessera", Flag, "FULL_STATE_DICT", File, false},
                                                                               {"tessera", File, "FULL_STATE_DICT", Flag, true},
                                                                               {"accelerate", Flag, "LOCAL_STATE_DICT", File, true}}) {
    Settings settings;
    if (format_origin != Default) settings.set("tessera_checkpoint_format", format, format_origin, "-");
    if (layout_origin != Default) settings.set("fsdp_state_dict_type", layout, layout_origin, "-");
    settings.expect_consistent();
    EXPECT_EQ(settings.saves_for_accelerate(), expected) << format << " " << layout;
  }
}

TEST_F(Files, ThatDivideRanksOtherwiseThanTheStrategyAreRefused) {
  const std::string sizes = "parallelism_config: {dp_replicate_size: 2, dp_shard_size: 2}\n";
  EXPECT_THAT(error("distributed_type: MULTI_CPU\n" + sizes), HasSubstr("contradicts distributed_type MULTI_CPU ("));
  EXPECT_THAT(error("fsdp_config: {sharding_strategy: NO_SHARD}\n" + sizes), HasSubstr("contradicts fsdp_sharding_strategy NO_SHARD"));
  EXPECT_THAT(error("fsdp_config: {sharding_strategy: HYBRID_SHARD}\nparallelism_config: {dp_shard_size: 2}\n"),
              HasSubstr("contradicts fsdp_sharding_strategy HYBRID_SHARD"));
  EXPECT_THAT(error("fsdp_config: {reshard_after_forward: NO_SHARD}\n" + sizes),
              HasSubstr("contradicts fsdp_reshard_after_forward NO_SHARD"));
  EXPECT_EQ(read("fsdp_config: {sharding_strategy: HYBRID_SHARD}\n" + sizes).sharding_strategy(), "HYBRID_SHARD");
}

TEST(Strategy, IsThatOfTheStrongerOrigin) {
  const auto strategy = [](const char* version, const char* key, const char* in_file, const char* other, const char* by_flag) {
    Settings settings;
    settings.set("fsdp_version", version, Origin::File, "c.yaml:1");
    settings.set(key, in_file, Origin::File, "c.yaml:2");
    settings.set(other, by_flag, Origin::Flag, "--flag");
    settings.expect_consistent();
    // Ranks come to the same strategy, whether they know the origins or not.
    const auto variables = settings.environment();
    for (const auto* unknown : {"", "TESSERA_SETTINGS_FROM"}) {
      std::list<Set> set;
      for (const auto& [name, value] : variables) {
        if (name != unknown) set.emplace_back(name.c_str(), value.c_str());
      }
      Settings of_ranks;
      of_ranks.read_environment();
      of_ranks.expect_consistent();
      EXPECT_EQ(of_ranks.sharding_strategy(), settings.sharding_strategy());
    }
    return settings.sharding_strategy();
  };
  const auto *sharding = "fsdp_sharding_strategy", *reshard = "fsdp_reshard_after_forward";
  EXPECT_EQ(strategy("2", reshard, "true", sharding, "SHARD_GRAD_OP"), "SHARD_GRAD_OP");
  EXPECT_EQ(strategy("1", sharding, "SHARD_GRAD_OP", reshard, "true"), "FULL_SHARD");
  EXPECT_EQ(strategy("1", sharding, "SHARD_GRAD_OP", reshard, "NO_SHARD"), "NO_SHARD");
  EXPECT_EQ(strategy("1", reshard, "SHARD_GRAD_OP", sharding, "FULL_SHARD"), "FULL_SHARD");
  EXPECT_EQ(strategy("2", sharding, "HYBRID_SHARD", reshard, "false"), "HYBRID_SHARD_ZERO2");
  EXPECT_EQ(strategy("2", sharding, "NO_SHARD", reshard, "true"), "FULL_SHARD");
}

TEST(Strategy, OutlivesVariablesThatRanksInherit) {
  Settings settings;
  const Set inherited("FSDP_RESHARD_AFTER_FORWARD", "SHARD_GRAD_OP");
  settings.read_environment();
  settings.set("fsdp_sharding_strategy", "FULL_SHARD", Origin::Flag, "--fsdp-sharding-strategy");
  EXPECT_THAT(settings.environment(),
              AllOf(Contains(Pair("FSDP_SHARDING_STRATEGY", "FULL_SHARD")), Contains(Pair("FSDP_RESHARD_AFTER_FORWARD", "FULL_SHARD"))));
}

TEST_F(Files, ThatAreUpdatedDoNotContradictThemselves) {
  for (const auto* const reshard : {"true", "NO_SHARD"}) {
    for (const auto* const version : {"1", "2"}) {
      auto settings = read(std::string("fsdp_config: {version: ") + version + ", sharding_strategy: SHARD_GRAD_OP}\n");
      settings.set("fsdp_reshard_after_forward", reshard, Origin::Flag, "--set");
      const auto again = read(to_yaml(settings));
      again.expect_consistent();
      EXPECT_EQ(again.sharding_strategy(), settings.sharding_strategy()) << version << reshard;
    }
  }
}

TEST_F(Files, HaveTwoKeysWhereAccelerateKnowsThem) {
  Settings settings;
  settings.set("gradient_clipping", "0.5", Origin::Flag, "a");
  settings.set("gradient_accumulation_steps", "4", Origin::Flag, "a");
  EXPECT_THAT(to_yaml(settings), HasSubstr("deepspeed_config:\n  gradient_accumulation_steps: 4\n  gradient_clipping: 0.5\n"));
  for (const auto& text : {to_yaml(settings), to_json(settings)}) {
    EXPECT_EQ(read(text).number("gradient_clipping"), 0.5);
    EXPECT_EQ(read(text).integer("gradient_accumulation_steps"), 4);
  }
  EXPECT_THAT(error("gradient_clipping: 1\ndeepspeed_config: {gradient_clipping: 2}\n"), HasSubstr("is there already"));
  EXPECT_EQ(read("deepspeed_config: {gradient_clipping: auto, zero_stage: 3}\n").remarks().size(), 2U);
}

TEST(UsualFile, IsNamedByTheEnvironmentOrThere) {
  const Folder folder;
  const auto place = folder.path().string();
  const Set home("HF_HOME", place.c_str());
  EXPECT_EQ(config::usual_file(), "");
  std::filesystem::create_directory(folder / "accelerate");
  write_file(config::default_file(), "debug: false\n");
  EXPECT_EQ(config::usual_file(), config::default_file());
  const Set named("TESSERA_CONFIG_FILE", "/no/where.yaml");
  EXPECT_EQ(config::usual_file(), "/no/where.yaml");
}

TEST_F(Files, ThatAreWrittenInventNoRanks) {
  Settings settings;
  settings.set("mixed_precision", "bf16", Origin::Flag, "a");
  EXPECT_THAT(to_yaml(settings), HasSubstr("num_processes: -1\n"));
  const auto again = read(to_yaml(settings));
  EXPECT_FALSE(again.is_set("num_processes"));
  settings.set("num_processes", "4", Origin::Flag, "a");
  settings.set("fsdp_ignored_modules", "a: 'b'", Origin::Flag, "a");
  settings.set("gradient_clipping", "0.5", Origin::Flag, "a");
  const auto as_json = read(to_json(settings));
  EXPECT_EQ(to_yaml(as_json), to_yaml(settings));
  EXPECT_EQ(read("compute_environment:\n").text("compute_environment"), "LOCAL_MACHINE");
}

TEST(Settings, OfVersion2SayTheSame) {
  const auto convert = [](const std::string& strategy, bool with_ranks) {
    Settings settings;
    settings.set("fsdp_sharding_strategy", strategy, Origin::File, "c.yaml:1");
    settings.set("fsdp_backward_prefetch", "NO_PREFETCH", Origin::File, "c.yaml:2");
    settings.set("fsdp_state_dict_type", "LOCAL_STATE_DICT", Origin::File, "c.yaml:3");
    settings.set("num_machines", "2", Origin::File, "c.yaml:4");
    settings.add_remark("c.yaml:6: something else");
    if (with_ranks) settings.set("num_processes", "8", Origin::File, "c.yaml:5");
    auto converted = to_fsdp2(settings);
    converted.expect_consistent();
    EXPECT_EQ(converted.text("fsdp_version"), "2");
    EXPECT_FALSE(converted.is_set("fsdp_sharding_strategy"));
    EXPECT_THAT(converted.remarks(), Contains(HasSubstr("c.yaml:2: fsdp_backward_prefetch NO_PREFETCH has no key")));
    EXPECT_THAT(converted.remarks(), Contains(HasSubstr("c.yaml:3: fsdp_state_dict_type LOCAL_STATE_DICT has no key")));
    EXPECT_THAT(converted.remarks(), Contains("c.yaml:6: something else"));
    return converted;
  };
  for (const auto* strategy : {"FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"}) {
    EXPECT_EQ(convert(strategy, true).sharding_strategy(), strategy);
  }
  EXPECT_EQ(convert("HYBRID_SHARD", true).integer("parallelism_config_dp_shard_size"), 4);
  EXPECT_THAT(convert("HYBRID_SHARD", false).remarks(), Contains(HasSubstr("give that first, or else all ranks share one copy")));
}

TEST(Settings, OfVersion2KeepTheSizesThatWereGiven) {
  for (const auto* strategy : {"FULL_SHARD", "HYBRID_SHARD"}) {
    Settings settings;
    settings.set("fsdp_sharding_strategy", strategy, Origin::File, "c.yaml:1");
    settings.set("num_processes", "8", Origin::File, "c.yaml:2");
    settings.set("parallelism_config_dp_replicate_size", "4", Origin::File, "c.yaml:3");
    settings.set("parallelism_config_dp_shard_size", "2", Origin::File, "c.yaml:4");
    const auto converted = to_fsdp2(settings);
    EXPECT_EQ(converted.integer("parallelism_config_dp_replicate_size"), 4);
    EXPECT_EQ(converted.integer("parallelism_config_dp_shard_size"), 2);
    EXPECT_EQ(converted.sharding_strategy(), settings.sharding_strategy());
  }
}

TEST(DefaultFile, IsWhereAccelerateHasIt) {
  const Set home("HOME", "/home/me");
  EXPECT_EQ(config::default_file(), "/home/me/.cache/huggingface/accelerate/default_config.yaml");
  const Set cache("XDG_CACHE_HOME", "/cache");
  EXPECT_EQ(config::default_file(), "/cache/huggingface/accelerate/default_config.yaml");
  const Set place("HF_HOME", "~/hf");
  EXPECT_EQ(config::default_file(), "/home/me/hf/accelerate/default_config.yaml");
}

}  // namespace
}  // namespace tessera::testing::settings_test
