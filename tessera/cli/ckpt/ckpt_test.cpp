// `tessera ckpt` as a user meets it.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/torch.h>
#include <nlohmann/json.hpp>

#include "tessera/base/process.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/formats/safetensors.h"
#include "tessera/checkpoint/formats/torch/file.h"
#include "tessera/checkpoint/formats/torch_xla/torch_xla.h"
#include "tessera/checkpoint/peft.h"
#include "tessera/checkpoint/step_folders.h"
#include "tessera/checkpoint/stored/catalogs.h"
#include "tessera/nn/lora.h"
#include "tessera/optim/adam.h"
#include "tessera/shard/parameters.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"
#include "tests/testing/run_program.h"
#include "tests/testing/small_llama.h"
#include "tests/testing/torch_xla_files.h"

namespace tessera::testing::ckpt_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

Ended ckpt(const std::string& verb, const std::vector<std::string>& arguments) {
  std::string command = std::filesystem::path(this_program()).parent_path().parent_path() / "bin/tessera";
  command += " ckpt " + verb;
  for (const auto& argument : arguments) command += " '" + argument + "'";
  return run_program({"sh", "-c", command + " 2>&1"});
}

Ended consolidate(const std::vector<std::string>& arguments) {
  return ckpt("consolidate", arguments);
}

struct Ckpt : ::testing::Test {
  Folder folder;
  std::string prefix = folder / "net";
  void SetUp() override {
    with_ranks(2, [&](const Communicator& world) {
      const auto net = sharded_net(world);
      for (const int64_t step : {5, 20}) checkpoint::save(checkpoint::step_folder(prefix, step), {.model = net.ptr().get()}, world);
    });
  }
};

TEST_F(Ckpt, ConsolidatesTheNewestOfAPrefix) {
  const auto ended = consolidate({"--ckpt-prefix", prefix});
  EXPECT_EQ(ended.status, 0);
  EXPECT_EQ(ended.output, prefix + "-step-000020 -> " + prefix + "_consolidated.pth: 6 tensors, 896 bytes; 224 parameters\n");
  EXPECT_TRUE(checkpoint::read_torch_file(prefix + "_consolidated.pth").tensors.contains("model.a.weight"));
  EXPECT_EQ(consolidate({"--ckpt-prefix", prefix, "--save-path", prefix + ".safetensors"}).status, 0);
  EXPECT_EQ(checkpoint::SafetensorsFile(prefix + ".safetensors").names().size(), 6);
}

TEST_F(Ckpt, TakesTheCheckpointAsArgumentOrByFlag) {
  for (const auto& how : std::vector<std::vector<std::string>>{{prefix}, {"--ckpt-prefix", prefix}}) {
    EXPECT_EQ(consolidate(how).status, 0);
    for (const auto* verb : {"inspect", "verify"}) EXPECT_THAT(ckpt(verb, how).output, HasSubstr("net-step-000020"));
    auto flags = how;
    flags.insert(flags.end(), {"--keep-last", "2"});
    EXPECT_THAT(ckpt("prune", flags).output, HasSubstr("0 removed, 2 left"));
  }
  EXPECT_EQ(ckpt("inspect", {prefix, "--ckpt-prefix", prefix}).status, 2);
}

TEST_F(Ckpt, WritesNoFormatThatItDoesNotKnow) {
  for (const auto* name : {"net.onnx", "net.tflite", "net.pkl"}) {
    const auto ended = consolidate({prefix, "--save-path", folder / name});
    EXPECT_EQ(ended.status, 2);
    EXPECT_THAT(ended.output, HasSubstr("asks for another format: the name of a safetensors file ends in .safetensors"));
    EXPECT_FALSE(std::filesystem::exists(folder / name));
  }
  EXPECT_EQ(consolidate({prefix, "--save-path", folder / "net-0.5"}).status, 0);
}

TEST_F(Ckpt, ConsolidatesTheFolderThatIsNamed) {
  const auto ended = consolidate({"--ckpt_prefix", prefix + "-step-000005/", "--save_path", folder / "out"});
  EXPECT_EQ(ended.status, 0);
  EXPECT_THAT(ended.output, HasSubstr("net-step-000005 -> "));
  EXPECT_TRUE(std::filesystem::exists(folder / "out"));
  EXPECT_EQ(consolidate({"--ckpt-prefix", prefix + "-step-000005/"}).status, 0);
  EXPECT_TRUE(std::filesystem::exists(prefix + "-step-000005_consolidated.pth"));
}

std::map<std::string, at::Tensor> parameters_of(const std::filesystem::path& path) {
  const checkpoint::CatalogReader reader(checkpoint::read_model(path));
  std::map<std::string, at::Tensor> all;
  for (const auto& [name, tensor] : reader.catalog().tensors) all[name] = reader.read(name);
  return all;
}

TEST_F(Ckpt, ConsolidatesRankFilesAsTorchXlaDoes) {
  const std::string theirs = folder / "xla";
  write_torch_xla(theirs, 3, parameters_of(prefix + "-step-000005"));
  const auto ended = consolidate({"--ckpt_prefix", theirs});
  EXPECT_EQ(ended.output, theirs + " -> " + theirs + "_consolidated.pth: 6 tensors, 896 bytes; 224 parameters\n");
  EXPECT_THAT(ckpt("inspect", {theirs}).output, AllOf(HasSubstr("rank files of torch_xla of 3 ranks"), HasSubstr("c.bias")));
  EXPECT_THAT(ckpt("verify", {"--ckpt-prefix", theirs}).output, HasSubstr("is whole: 3 files, 12 tensors"));
  EXPECT_EQ(ckpt("merge", {theirs, folder / "merged", "--remove-checkpoint-dir"}).status, 0);
  EXPECT_TRUE(checkpoint::torch_xla_files(theirs).empty());
  write_torch_xla(theirs, 3, parameters_of(prefix + "-step-000005"));
  // The default of torch_xla matches the file that is there now, too.
  for (const auto* suffix : {"*.pth", "_rank-*-of-*.pth"}) {
    EXPECT_EQ(consolidate({"--ckpt_prefix", theirs, "--ckpt_suffix", suffix, "--save_path", folder / "out.pth"}).status, 0);
    EXPECT_TRUE(checkpoint::read_torch_file(folder / "out.pth").tensors.contains("model.c.bias"));
  }
  for (int rank = 0; rank < 3; rank++) {
    std::filesystem::copy_file(torch_xla_file(theirs, rank, 3), fmt::format("{}.part{}.ckpt", (folder / "epoch3").string(), rank));
  }
  const auto merged = ckpt("merge", {"--ckpt_prefix", folder / "epoch3", "--ckpt_suffix", ".part*.ckpt", folder / "merged3"});
  EXPECT_EQ(merged.status, 0) << merged.output;
  EXPECT_THAT(merged.output, HasSubstr("epoch3.part*.ckpt -> "));
  EXPECT_TRUE(std::filesystem::exists(folder / "merged3" / "model.safetensors"));
  EXPECT_THAT(consolidate({"--ckpt_prefix", theirs, "--ckpt_suffix", "-none"}).output,
              HasSubstr("there is no checkpoint " + theirs + "-none"));
  std::filesystem::rename(torch_xla_file(theirs, 2, 3), folder / "elsewhere");
  EXPECT_THAT(consolidate({"--ckpt_prefix", theirs}).output, HasSubstr("the file of rank 2 is missing"));
}

TEST_F(Ckpt, SaysWhatIsThereInstead) {
  const auto ended = consolidate({"--ckpt-prefix", folder / "nett"});
  EXPECT_EQ(ended.status, 1);
  EXPECT_THAT(ended.output,
              AllOf(HasSubstr("none called nett-step-N"), HasSubstr(folder.path().string() + " has net-step-000005, net-step-000020")));
  EXPECT_THAT(ended.output, HasSubstr("did you mean " + prefix + "? "));
  const auto mistyped = consolidate({"--ckpt-prefix", prefix + "-step-00020"}).output;
  EXPECT_THAT(mistyped, HasSubstr("did you mean " + prefix + "-step-000020? "));
  EXPECT_THAT(ckpt("prune", {folder / "nett", "--keep-last", "1"}).output, HasSubstr("did you mean " + prefix + "? "));
  for (const auto* other : {"above", "below", "first", "last", "old"})
    std::filesystem::create_directory(folder / (other + std::string("-step-000001")));
  EXPECT_THAT(consolidate({"--ckpt-prefix", folder / "nett"}).output, HasSubstr(" has net-step-000005, net-step-000020, "));
  EXPECT_THAT(consolidate({"--ckpt-prefix", folder / "model"}).output, Not(HasSubstr("did you mean")));
  EXPECT_THAT(consolidate({"--ckpt-prefix", folder / "old"}).output, Not(HasSubstr("did you mean")));
  EXPECT_THAT(consolidate({"--ckpt-prefix", folder / "a/b"}).output, HasSubstr("there is no folder"));
  EXPECT_EQ(consolidate({}).status, 2);
  write_file(folder / "file", "");
  EXPECT_THAT(consolidate({"--ckpt-prefix", prefix, "--save-path", folder / "file/out"}).output, HasSubstr("/file: Not a directory"));
}

TEST_F(Ckpt, VerifiesEveryFile) {
  const auto whole = ckpt("verify", {"--ckpt-prefix", prefix});
  EXPECT_EQ(whole.status, 0);
  EXPECT_EQ(whole.output, prefix + "-step-000020 is whole: 2 files, 7 tensors, 11008 bytes\n");
  const auto file = std::filesystem::path(prefix + "-step-000020") / "rank-1-of-2.safetensors";
  auto bytes = read_file(file);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  write_file(file, bytes);
  const auto damaged = ckpt("verify", {"--ckpt-prefix", prefix});
  EXPECT_EQ(damaged.status, 1);
  EXPECT_THAT(damaged.output, AllOf(HasSubstr("rank-1-of-2.safetensors is damaged: the bytes of '"), HasSubstr("is damaged in 1 place")));
  EXPECT_EQ(ckpt("verify", {"--ckpt-prefix", file}).status, 1);
  const auto earlier = prefix + "-step-000005";
  EXPECT_EQ(ckpt("verify", {"--ckpt-prefix", earlier}).status, 0);
  const auto manifest = read_file(earlier + "/manifest.json");
  std::filesystem::remove(earlier + "/manifest.json");
  const auto without_manifest = ckpt("verify", {"--ckpt-prefix", earlier});
  EXPECT_EQ(without_manifest.status, 0);
  EXPECT_THAT(without_manifest.output,
              AllOf(HasSubstr("has all its bytes: 2 files"), HasSubstr("bytes; it has no manifest.json, so only its files")));
  write_file(earlier + "/manifest.json", manifest);
  auto header = bytes;
  header[9] ^= 1;
  write_file(file, header);
  for (const auto* verb : {"inspect", "verify"}) {
    const auto refused = ckpt(verb, {prefix});
    EXPECT_EQ(refused.status, 1) << verb;
    EXPECT_THAT(refused.output, HasSubstr("rank-1-of-2.safetensors")) << verb;
  }
  const auto compared = ckpt("diff", {prefix + "-step-000005", prefix + "-step-000020"});
  EXPECT_NE(compared.status, 0);
  EXPECT_THAT(compared.output, HasSubstr("rank-1-of-2.safetensors"));
  std::filesystem::remove(file);
  EXPECT_THAT(ckpt("verify", {"--ckpt-prefix", prefix + "-step-000020"}).output, HasSubstr("'rank-1-of-2.safetensors' is missing"));
  const auto older = ckpt("verify", {prefix});
  EXPECT_EQ(older.status, 1);
  EXPECT_THAT(older.output, AllOf(HasSubstr("net-step-000005 is whole"), HasSubstr("net-step-000020 is newer, and can't be loaded: ")));
  EXPECT_THAT(ckpt("verify", {"--ckpt-prefix", folder / "none"}).output, HasSubstr("none called none-step-N"));
}

TEST_F(Ckpt, MergesInspectsAndPrunes) {
  const auto out = (folder / "out").string();
  const auto merged = ckpt("merge", {prefix, out, "--dtype", "bf16", "--max-shard-size", "0.3KB"});
  EXPECT_EQ(merged.status, 0) << merged.output;
  EXPECT_THAT(merged.output, HasSubstr("net-step-000020 -> " + out + ": 6 tensors, 448 bytes in "));
  EXPECT_TRUE(std::filesystem::exists(folder / "out/model.safetensors.index.json"));
  const auto wrong = ckpt("merge", {prefix, out, "--dtype", "int8"});
  EXPECT_EQ(wrong.status, 2);
  EXPECT_THAT(wrong.output, HasSubstr("--dtype: 'int8' is not a dtype for weights; write fp32, fp16 or bf16"));
  EXPECT_THAT(ckpt("merge", {prefix, out, "--max-shard-size", "5XB"}).output, HasSubstr("'5XB' is not a size"));
  EXPECT_THAT(ckpt("merge", {prefix}).output, HasSubstr("OUT is required"));
  EXPECT_EQ(ckpt("merge", {prefix, out, "more"}).status, 2);
  EXPECT_THAT(ckpt("inspect", {prefix}).output, AllOf(HasSubstr("of 2 ranks"), HasSubstr("a.weight"), HasSubstr("in 2 files")));
  EXPECT_EQ(nlohmann::json::parse(ckpt("inspect", {out, "--json"}).output)["total"]["numel"], 224);
  EXPECT_THAT(ckpt("prune", {"--ckpt-prefix", prefix, "--keep-last", "1"}).output,
              AllOf(HasSubstr("net-step-000005"), HasSubstr("1 removed, 1 left")));
  EXPECT_THAT(ckpt("prune", {"--ckpt-prefix", folder / "none", "--keep-last", "1"}).output,
              HasSubstr("there is no checkpoint none-step-N"));
  EXPECT_EQ(ckpt("prune", {"--ckpt-prefix", prefix}).status, 2);
}

TEST_F(Ckpt, WritesNothingThatHidesARun) {
  for (const auto& out : {prefix, prefix + "/"}) {
    const auto ended = ckpt("merge", {prefix, out});
    EXPECT_EQ(ended.status, 2);
    EXPECT_THAT(ended.output, HasSubstr(prefix + " is the prefix of a run; a file or folder of this name would hide its checkpoints " +
                                        prefix + "-step-N"));
  }
  EXPECT_EQ(ckpt("convert", {prefix, prefix, "--to", "tessera"}).status, 2);
  EXPECT_EQ(ckpt("merge", {prefix, prefix, "--unsafe-serialization"}).status, 2);
  EXPECT_EQ(ckpt("merge", {prefix + "-step-000005", prefix}).status, 2);
  EXPECT_EQ(ckpt("reshard", {prefix, prefix, "--world", "3"}).status, 2);
  EXPECT_EQ(consolidate({"--ckpt-prefix", prefix, "--save-path", prefix}).status, 2);
  EXPECT_FALSE(std::filesystem::exists(prefix));
  EXPECT_EQ(ckpt("merge", {prefix, prefix + "-merged"}).status, 0);
}

TEST_F(Ckpt, TellsWrongUsageFromFailure) {
  const auto dcp = (folder / "dcp").string(), out = (folder / "out").string();
  EXPECT_EQ(ckpt("convert", {prefix, dcp, "--to", "dcp"}).status, 0);
  const std::vector<std::pair<std::vector<std::string>, std::string>> wrong = {
      {{"--to", "zip"}, "--to: 'zip' is not a format; write one of accelerate, dcp, gguf, hub, safetensors"},
      {{"--to", "dcp", "--from", "zip"}, "--from: 'zip' is not a format"},
      {{"--to", "dcp", "--set", "lr"}, "NAME=VALUE"},
      {{"--to", "dcp", "--set", "lr={}"}, "--set lr={}: the value is not a number"},
      {{"--to", "dcp", "--set", "lr=fast"}, "--set lr=fast: the value is not a number"},
      {{"--to", "dcp", "--memory", "0"}, "--memory: '0' is not a size"},
      {{"--to", "tessera", "--world", "0"}, "--world: "},
      {{"--to", "tessera", "--world", "1000000"}, "--world: "},
      {{"--to", "hub", "--world", "2"}, "--world means nothing for --to hub"},
      {{"--to", "dcp", "--full"}, "--full means nothing for --to dcp"},
      {{"--to", "dcp", "--max-shard-size", "1GB"}, "--max-shard-size means nothing for --to dcp"},
      {{"--to", "torch_xla"}, "--to: rank files of torch_xla are read, not written"},
  };
  for (const auto& [flags, said] : wrong) {
    std::vector<std::string> arguments = {dcp, out};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    const auto ended = ckpt("convert", arguments);
    EXPECT_EQ(ended.status, 2) << ended.output;
    EXPECT_THAT(ended.output, HasSubstr(said));
  }
  EXPECT_EQ(ckpt("diff", {dcp, dcp, "--memory", "much"}).status, 2);
  for (const auto* flag : {"--keep-last", "--keep-every"}) {
    for (const auto* number : {"0", "-3"}) {
      const auto few = ckpt("prune", {"--ckpt-prefix", prefix, flag, number});
      EXPECT_EQ(few.status, 2);
      EXPECT_THAT(few.output, HasSubstr(std::string(flag) + ": '" + number + "' is not a whole number from 1 to"));
    }
  }
  EXPECT_EQ(ckpt("prune", {"--ckpt-prefix", prefix, "--keep-best", "2"}).status, 2);
  const auto other = ckpt("convert", {dcp, out, "--to", "hub", "--from", "torch"});
  EXPECT_EQ(other.status, 1);
  EXPECT_THAT(other.output, HasSubstr("not a file of torch.save"));
  EXPECT_FALSE(std::filesystem::exists(out));
}

TEST_F(Ckpt, ConvertsAdapters) {
  const auto base = folder / "base", adapter = folder / "adapter", file = folder / "adapter.gguf", back = folder / "back";
  auto model = write_model(base, small_config("llama"));
  lora::apply(model, {.r = 4});
  checkpoint::save_adapter(model, adapter, self_world());
  const auto there = ckpt("convert", {adapter, file, "--to", "gguf", "--base", base});
  EXPECT_EQ(there.status, 0) << there.output;
  EXPECT_THAT(there.output, HasSubstr("adapter.gguf: a GGUF file with an adapter, "));
  EXPECT_THAT(ckpt("inspect", {file}).output, HasSubstr("adapter.gguf: a GGUF file with an adapter\n"));
  const auto returned = ckpt("convert", {file, back, "--to", "hub"});
  EXPECT_EQ(returned.status, 0) << returned.output;
  EXPECT_EQ(read_file(back / "adapter_model.safetensors"), read_file(adapter / "adapter_model.safetensors"));
  const auto refusal = [&](const std::vector<std::string>& arguments, int status) {
    const auto ended = ckpt("convert", arguments);
    EXPECT_EQ(ended.status, status) << ended.output;
    return ended.output;
  };
  const std::string other = folder / "other.gguf";
  EXPECT_THAT(refusal({adapter, other, "--to", "gguf"}, 1), HasSubstr("give --base MODEL"));
  EXPECT_THAT(refusal({adapter, other, "--to", "gguf", "--base", file}, 1), HasSubstr("holds an adapter and no model"));
  EXPECT_THAT(refusal({adapter, other, "--to", "gguf", "--base", base, "--code", "F16"}, 1),
              HasSubstr("--code means nothing for an adapter"));
  EXPECT_THAT(refusal({base, other, "--to", "gguf", "--base", base}, 1), HasSubstr("--base is for adapters, and"));
  EXPECT_THAT(refusal({adapter, folder / "x", "--to", "dcp"}, 1), HasSubstr("holds an adapter, which becomes a GGUF file: --to gguf"));
  EXPECT_THAT(refusal({file, folder / "x", "--to", "dcp"}, 1), HasSubstr("holds an adapter, which becomes a folder of peft: --to hub"));
  EXPECT_THAT(refusal({file, folder / "x", "--to", "hub", "--dtype", "bf16"}, 1), HasSubstr("--dtype means nothing for an adapter"));
  EXPECT_EQ(ckpt("reshard", {adapter, folder / "x", "--world", "2"}).status, 1);
  EXPECT_EQ(ckpt("convert", {adapter, adapter / "x.gguf", "--to", "gguf", "--base", base}).status, 2);
  EXPECT_FALSE(std::filesystem::exists(other));
}

TEST_F(Ckpt, NamesFlagsInErrorsOfTheLibrary) {
  const auto run = (folder / "run").string();
  with_ranks(2, [&](const Communicator& world) {
    const auto net = sharded_net(world);
    optim::AdamW optimizer(parameters(*net), {.lr = 0.1});
    checkpoint::save(run, {.model = net.ptr().get(), .optimizer = &optimizer, .notes = {{"rank", world.rank()}}}, world);
  });
  EXPECT_THAT(ckpt("reshard", {run, folder / "out", "--world", "3"}).output,
              HasSubstr("load with --notes-of-first-rank if those of rank 0"));
  EXPECT_THAT(ckpt("convert", {run, folder / "out", "--to", "dcp", "--notes-of-first-rank"}).output,
              HasSubstr("give it with --set lr=VALUE, or convert the weights only (--weights-only)"));
  EXPECT_EQ(ckpt("convert", {run, folder / "out", "--to", "dcp", "--notes-of-first-rank", "--set", "lr=0.1"}).status, 0);
}

TEST_F(Ckpt, SaysWhatItCouldNotVerify) {
  const std::string header = R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";  // as Python's package writes it
  write_file(folder / "python.safetensors", std::string{static_cast<char>(header.size())} + std::string(7, '\0') + header + "12345678");
  EXPECT_THAT(ckpt("verify", {"--ckpt-prefix", folder / "python.safetensors"}).output,
              HasSubstr("python.safetensors has all its bytes: 1 file, 1 tensor, 8 bytes; there are no checksums to compare\n"));
  EXPECT_THAT(ckpt("verify", {"--ckpt-prefix", prefix, "--cheap"}).output, HasSubstr("; checksums were not compared\n"));
}

TEST_F(Ckpt, HintsAtTheFolderOfAPart) {
  const auto dcp = (folder / "dcp").string(), hub = (folder / "hub").string(), native = prefix + "-step-000020";
  ckpt("convert", {prefix, dcp, "--to", "dcp"});
  ckpt("merge", {prefix, hub, "--max-shard-size", "0.3KB"});
  const std::vector<std::pair<std::string, std::string>> parts = {{dcp, "/.metadata"},
                                                                  {dcp, "/__0_0.distcp"},
                                                                  {hub, "/model.safetensors.index.json"},
                                                                  {native, "/manifest.json"},
                                                                  {native, "/rank-0-of-2.safetensors"}};
  for (const auto& [whole, part] : parts) {
    const auto ended = ckpt("inspect", {whole + part});
    EXPECT_EQ(ended.status, 1);
    EXPECT_THAT(ended.output, HasSubstr(part + " is a part of a checkpoint; give its folder, " + whole));
  }
}

TEST_F(Ckpt, ShowsControlCharactersInNames) {
  const auto write = [&](const std::string& file, const std::string& name) {
    checkpoint::SafetensorsWriter writer(folder / file, {{.name = name, .dtype = at::kFloat, .sizes = {2}}});
    writer.write(at::ones({2}));
    writer.close();
    return (folder / file).string();
  };
  const auto one = write("one.safetensors", "a\x1b[2J\nb"), other = write("other.safetensors",
                                                                          "\xc2\x9b"
                                                                          "2J");
  const auto inspected = ckpt("inspect", {one});
  EXPECT_THAT(inspected.output, AllOf(HasSubstr("a\\x1b[2J\\x0ab "), HasSubstr("1 tensor, 2 values, 8 bytes in 1 file\n")));
  const auto different = ckpt("diff", {one, other});
  EXPECT_THAT(different.output, AllOf(HasSubstr("only in the first: a\\x1b[2J\\x0ab\n"), HasSubstr("only in the second: \\x9b2J\n")));
  std::filesystem::resize_file(one, std::filesystem::file_size(one) - 1);
  const auto cut = ckpt("inspect", {one});
  for (const auto& ended : {inspected, different, cut}) EXPECT_EQ(ended.output.find('\x1b'), std::string::npos) << ended.output;
}

TEST_F(Ckpt, ConvertsReshardsAndCompares) {
  const auto dcp = (folder / "dcp").string(), three = (folder / "three").string();
  const auto converted = ckpt("convert", {prefix, dcp, "--to", "dcp", "--from", "tessera", "--world", "2"});
  EXPECT_EQ(converted.status, 0) << converted.output;
  EXPECT_THAT(converted.output,
              HasSubstr("net-step-000020 -> " + dcp + ": a folder of torch.distributed.checkpoint, 6 tensors, 896 bytes\n"));
  EXPECT_EQ(ckpt("reshard", {dcp, three, "--world", "3"}).status, 0);
  EXPECT_THAT(ckpt("inspect", {three}).output, HasSubstr("of 3 ranks"));
  const auto equal = ckpt("diff", {prefix, three});
  EXPECT_EQ(equal.status, 0);
  EXPECT_EQ(equal.output, "7 tensors are equal, 0 are not\n");
  EXPECT_EQ(ckpt("convert", {dcp, folder / "half", "--to", "safetensors", "--dtype", "fp16"}).status, 0);
  const auto different = ckpt("diff", {prefix, folder / "half"});
  EXPECT_EQ(different.status, 1);
  EXPECT_THAT(different.output, AllOf(HasSubstr("only in the first: .generator.cpu"), HasSubstr("Float [10] / Half [10]")));
  EXPECT_EQ(nlohmann::json::parse(ckpt("diff", {prefix, folder / "half", "--json"}).output)["different"].size(), 6U);
  const auto trouble = ckpt("diff", {prefix, folder / "none"});
  EXPECT_EQ(trouble.status, 2);
  EXPECT_THAT(trouble.output, HasSubstr("none called none-step-N"));
  EXPECT_THAT(ckpt("reshard", {dcp, three, "--world", "3"}).output, HasSubstr("three"));
  EXPECT_THAT(ckpt("verify", {"--ckpt-prefix", three, "--cheap"}).output, HasSubstr("three has all its bytes: 3 files"));
}

}  // namespace
}  // namespace tessera::testing::ckpt_test
