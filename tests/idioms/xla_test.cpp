// Runs the corpus on two XLA devices, and makes the page docs/tables/xla-idioms.md of it: each idiom ends in the numbers of ranks on the
// CPU, or in an error.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>

#include "idiom.h"
#include "tessera/base/process.h"
#include "tessera/comm/threads/run_ranks.h"
#include "tessera/xla/init.h"
#include "tests/testing/child_task.h"
#include "tests/testing/folder.h"
#include "tests/testing/page.h"

namespace tessera::idioms::xla_test {
namespace {

constexpr int kRanks = 2;
constexpr double kEpsilon = 1e-3;  // a gradient of zero is rounding, which AdamW would make a step
constexpr size_t kLongest = 240;  // libtorch's errors may list all that it has
using Records = std::vector<std::vector<at::Tensor>>;  // of each rank

const Communicator& devices() {
  static const auto world = xla::init({.devices = kRanks});
  return world;
}

Records on_ranks(const Idiom& idiom) {
  Records records(kRanks);
  run_ranks(kRanks, [&](const Communicator& world) {
    Run own(world, {.ranks = kRanks, .epsilon = kEpsilon});
    idiom.act(own);
    records[static_cast<size_t>(world.rank())] = own.records();
  });
  return records;
}

Records on_devices(const Idiom& idiom) {
  Run run(devices(), {.ranks = kRanks, .sharded = Residence::Gathered, .epsilon = kEpsilon});
  idiom.act(run);
  Records records(kRanks);
  for (const auto& record : run.records()) {
    const auto replicas = record.is_cpu() ? std::vector<at::Tensor>(kRanks, record) : devices().replicas(record);
    for (size_t rank = 0; rank < kRanks; rank++) records[rank].push_back(replicas[rank]);
  }
  return records;
}

/// How the records differ; empty if they do not.
std::string difference(const Records& found, const Records& expected, double within) {
  for (size_t rank = 0; rank < kRanks; rank++) {
    if (found[rank].size() != expected[rank].size()) return fmt::format("rank {} has {} records, not {}", rank, found[rank].size(), expected[rank].size());
    for (size_t i = 0; i < expected[rank].size(); i++) {
      const auto &one = found[rank][i], &other = expected[rank][i];
      if (one.sizes() != other.sizes()) return fmt::format("rank {}, record {}: other sizes", rank, i);
      const auto wide = one.is_complex() ? at::kComplexDouble : at::kDouble;
      if (at::allclose(one.to(wide), other.to(wide), within, within, /*equal_nan=*/true)) continue;
      const auto largest = (one.to(wide) - other.to(wide)).abs().max().item<double>();
      return fmt::format("rank {}, record {} differs by {}", rank, i, largest);
    }
  }
  return {};
}

/// Norms of norms magnify how float32 is rounded, and compilers choose themselves where they round to 16 bits.
double tolerance(const std::string& chapter, const std::string& what) {
  return chapter == "Precision" || what.find("bfloat16") != std::string::npos ? 1e-2 : 3e-3;
}

/// "equal", or what the error says, or "WRONG: ...".
std::string outcome(const std::string& chapter, const Idiom& idiom) {
  Records found;
  try {
    found = on_devices(idiom);
  } catch (const std::exception& error) {
    xla::step_boundary();
    const std::string said = error.what();
    const auto is_expected = [&](const std::string& part) { return !part.empty() && said.find(part) != std::string::npos; };
    if (is_expected(idiom.refused) || is_expected(idiom.gathered)) return "refused";
    const auto line = said.substr(0, said.find('\n'));
    return line.size() <= kLongest ? fmt::format("\"{}\"", line) : fmt::format("\"{}...\"", line.substr(0, kLongest));
  }
  if (!idiom.refused.empty()) return "not refused";
  const auto wrong = difference(found, on_ranks(idiom), tolerance(chapter, idiom.what));
  if (!idiom.on_xla.empty()) return wrong.empty() ? "WRONG: equal" : "other numbers: " + idiom.on_xla;
  return wrong.empty() ? "equal" : "WRONG: " + wrong;
}

struct Trial {
  std::string chapter;
  Idiom idiom;
};

std::vector<Trial> trials() {
  std::vector<Trial> all;
  for (const auto& chapter : corpus()) {
    for (const auto& idiom : chapter.idioms) all.push_back({chapter.title, idiom});
  }
  return all;
}

/// Runs the idioms from a number on, and writes their outcomes, a line each, up to one that ends the process.
const testing::ChildTask kRunFrom("idioms from", [](const std::string& words) {
  (void)devices();
  const auto all = trials();
  const auto space = words.find(' ');
  std::ofstream lines(words.substr(space + 1), std::ios::app);
  for (size_t i = std::stoul(words.substr(0, space)); i < all.size(); i++) lines << outcome(all[i].chapter, all[i].idiom) << std::endl;
  return 0;
});

std::vector<std::string> lines_of(const std::filesystem::path& file) {
  std::ifstream stream(file);
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

TEST(XlaPage, IsMadeFromTheCorpus) {
  const testing::Folder folder;
  const auto all = trials();
  const auto file = folder / "outcomes";
  for (;;) {
    Process child({this_program()}, kRunFrom.environment(fmt::format("{} {}", lines_of(file).size(), file.string())));
    const auto status = child.wait(std::chrono::minutes(30));
    if (status == 0) break;
    ASSERT_EQ(status, 128 + SIGSEGV) << all[lines_of(file).size()].idiom.what;
    std::ofstream(file, std::ios::app) << "the process ends: an address in a device's memory can't be read" << std::endl;
    if (lines_of(file).size() == all.size()) break;
  }
  const auto outcomes = lines_of(file);
  std::map<std::string, int> counts;
  std::string rows;
  for (size_t i = 0; i < all.size(); i++) {
    EXPECT_FALSE(outcomes[i].starts_with("WRONG")) << all[i].chapter << ": " << all[i].idiom.what << ": " << outcomes[i];
    const bool as_ranks = outcomes[i] == (all[i].idiom.refused.empty() ? "equal" : "refused");
    counts[as_ranks ? outcomes[i] : "otherwise"]++;
    if (!as_ranks) rows += fmt::format("| {} | {} | {} |\n", all[i].chapter, all[i].idiom.what, outcomes[i]);
  }
  const auto text = fmt::format(
      "# Idioms on XLA devices\n\n"
      "The [idioms](idioms.md) on two XLA devices of one process, beside ranks that average gradients on the CPU: {} end in the same numbers,\n"
      "{} are refused for the same reason. The others are below, with what the error says: nearly all ask for the rank of the process, which\n"
      "stands for all of them, give an operator tensors of the host beside those of the device, or read memory by its address. Differences\n"
      "of up to three thousandths count as equal, of up to a hundredth in 16 bits. This page is made by the tests:\n"
      "`TESSERA_TEST_WRITE_PAGES=1 ./check --long idioms/XlaPage`.\n\n"
      "| chapter | idiom | |\n| --- | --- | --- |\n{}",
      counts["equal"], counts["refused"], rows);
  testing::expect_page(TESSERA_ROOT "/docs/tables/xla-idioms.md", text, "--long idioms/XlaPage");
}

}  // namespace
}  // namespace tessera::idioms::xla_test
