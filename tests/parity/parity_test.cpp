// Trains each case of cases.json with PyTorch's own FSDP2, with Tessera, and replicated, and compares the results. docs/tables/parity.md is made
// of it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fmt/format.h>

#include <cmath>
#include <iostream>
#include <limits>
#include <sstream>

#include "case.h"
#include "formula.h"
#include "tessera/base/launcher.h"
#include "tessera/base/process.h"
#include "tessera/base/wide_products.h"
#include "tessera/comm/init.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"
#include "tests/testing/page.h"
#include "train.h"

namespace tessera::parity {
namespace {

/// What fsdp2.py has saved, by case. Run once for all tests.
const std::map<std::string, at::Tensor>& saved() {
  static const auto result = [] {
    const testing::Folder folder;
    const auto path = folder / "result.pt";
    Process process({TESSERA_TEST_PYTHON, TESSERA_ROOT "/tests/parity" "/fsdp2.py", TESSERA_ROOT "/tests/parity" "/cases.json", path},
                    {{"OMP_NUM_THREADS", "1"}}, Process::Output::Capture);
    const auto output = process.read_output();
    EXPECT_EQ(process.wait(std::chrono::seconds(10)), 0) << output;
    std::ifstream file(path, std::ios::binary);
    const std::vector<char> bytes(std::istreambuf_iterator<char>(file), {});
    std::map<std::string, at::Tensor> tensors;
    for (const auto& entry : torch::pickle_load(bytes).toGenericDict()) tensors[entry.key().toStringRef()] = entry.value().toTensor();
    return tensors;
  }();
  return result;
}

Result train_with_fsdp2(const Case& test) {
  const auto get = [&](const std::string& what) { return saved().at(test.name + "/" + what); };
  const auto list = [&](const std::string& what) {
    const auto values = get(what);
    return std::vector<double>(values.const_data_ptr<double>(), values.const_data_ptr<double>() + values.numel());
  };
  const auto number = [&](const std::string& what) { return get(what).item<int64_t>(); };
  Result result{.losses = list("losses"),
                .norms = list("norms"),
                .state = {},
                .received = {.gathered = number("gathered"), .reduced = number("reduced"), .all_reduced = number("all_reduced")}};
  const auto prefix = test.name + "/state/";
  for (const auto& [name, tensor] : saved()) {
    if (name.starts_with(prefix)) result.state[name.substr(prefix.size())] = tensor;
  }
  // In bfloat16, gradients of a batch norm are rough, and those of what comes before it, whose scale it takes away, are mostly rounding.
  for (const auto& noise : test.names("noise")) {
    const auto lies_in = [&](const auto& named) { return named.first.starts_with("optimizer." + noise + "."); };
    EXPECT_GT(std::erase_if(result.state, lies_in), 0) << noise;
  }
  return result;
}

/// The largest difference, relative to the largest expected value. Two infinities, as those of a float16 that overflows, do not differ.
double difference(const at::Tensor& actual, const at::Tensor& expected) {
  if (actual.sizes() != expected.sizes()) return std::numeric_limits<double>::infinity();
  const auto one = actual.to(at::kDouble), other = expected.to(at::kDouble);
  if (other.numel() == 0) return 0;
  const auto apart = at::where(one == other, 0.0, (one - other).abs() / other.abs().max().clamp_min(1e-30)).max().item<double>();
  return std::isnan(apart) ? std::numeric_limits<double>::infinity() : apart;
}

double difference(const std::vector<double>& actual, const std::vector<double>& expected) {
  if (actual.size() != expected.size()) return std::numeric_limits<double>::infinity();
  double largest = 0;
  for (size_t i = 0; i < actual.size(); i++) {
    largest = std::max(largest, difference(at::scalar_tensor(actual[i], at::kDouble), at::scalar_tensor(expected[i], at::kDouble)));
  }
  return largest;
}

double difference(const std::map<std::string, at::Tensor>& actual, const std::map<std::string, at::Tensor>& expected) {
  double largest = 0;
  for (const auto& [name, tensor] : expected) {
    const auto own = actual.find(name);
    EXPECT_NE(own, actual.end()) << name;
    if (own != actual.end()) largest = std::max(largest, difference(own->second, tensor));
  }
  return largest;
}

/// How much results may differ. 0 means the same bits, but for norms, which are sums over shards.
double bound(const Case& test, const std::string& side) {
  return test.get("within", nlohmann::json::object()).value(side, side == "replicated" ? 0.0 : 1e-5);
}

void expect_near(const Result& actual, const Result& expected, double within) {
  EXPECT_LE(difference(actual.losses, expected.losses), within);
  EXPECT_LE(difference(actual.norms, expected.norms), std::max(within, 1e-6));
  EXPECT_LE(difference(actual.state, expected.state), within);
}

class Parity : public ::testing::TestWithParam<Case> {};

TEST_P(Parity, HoldsForLossesNormsWeightsAndBytes) {
  const auto& test = GetParam();
  const auto fsdp2 = train_with_fsdp2(test);
  ASSERT_EQ(fsdp2.losses.size(), 3);
  EXPECT_NE(fsdp2.losses.front(), fsdp2.losses.back()) << "nothing was trained";
  EXPECT_EQ(fsdp2.received, bytes_by_formula(test, Side::Fsdp2));
  testing::with_ranks(test.ranks, [&](const Communicator& world) {
    at::set_num_threads(1);  // as there: in bfloat16 the order of sums shows
    const auto tessera = train_with_tessera(world, test);
    EXPECT_EQ(tessera.received, bytes_by_formula(test, Side::Tessera)) << "rank " << world.rank();
    {
      SCOPED_TRACE("replicated");
      expect_near(tessera, train_replicated(world, test), bound(test, "replicated"));
    }
    SCOPED_TRACE("FSDP2");
    // Where the processor has no instructions for a product of bfloat16, Tessera rounds it once, and PyTorch alone more often.
    const bool is_rounded_otherwise = multiplies_slowly(at::kBFloat16) && test.get("param_dtype", std::string()) == "bfloat16";
    expect_near(tessera, fsdp2, std::max(bound(test, "fsdp2"), is_rounded_otherwise ? 2e-2 : 0));
  });
}

std::string test_name(const ::testing::TestParamInfo<Case>& info) {
  std::string result;
  std::ranges::copy_if(info.param.name, std::back_inserter(result), [](unsigned char c) { return std::isalnum(c) != 0; });
  return result;
}

INSTANTIATE_TEST_SUITE_P(, Parity, ::testing::ValuesIn(cases()), test_name);

/// Over the transport of a launcher that has started this program as each rank: every case for so many ranks.
TEST(Launched, HoldsOverItsTransport) {
  if (!identity_from_environment()) GTEST_SKIP() << "no launcher has started this process";
  const auto world = init();
  at::set_num_threads(1);
  const bool adds_as_sent = world.traits().sums == SumOrder::Any;  // so gradients are sent in the dtype in which they are to be added
  const bool one_level = world.traits().levels == 1;
  int trained = 0;
  for (const auto& test : cases()) {
    if (test.ranks != world.size() || (one_level && test.get("residence", std::string()) == "node-shared")) continue;
    SCOPED_TRACE(test.name);
    const auto tessera = train_with_tessera(world, test);
    if (one_level && (!adds_as_sent || !test.has("param_dtype"))) {
      EXPECT_EQ(tessera.received, bytes_by_formula(test, Side::Tessera));
    }
    const double rounding = !adds_as_sent ? 0 : test.get("reduce_dtype", std::string()) == "bfloat16" ? 2e-3 : 1e-5;
    expect_near(tessera, train_replicated(world, test), std::max(bound(test, "replicated"), rounding));
    trained++;
  }
  EXPECT_GT(trained, 0);
  std::cout << fmt::format("{} cases over {}\n", trained, world.traits().name);
}

std::string page() {
  std::ostringstream text;
  text
      << "# Parity with PyTorch\n\n"
         "How closely training with Tessera agrees with PyTorch's FSDP2 and with replicated libtorch, feature by feature.\n\n"
         "Each row is trained three times, from the same weights and batches: by Tessera, by PyTorch's own FSDP2 (gloo, on CPUs), and in\n"
         "plain libtorch with a copy of the model on each rank, whose gradients are averaged. Losses, norms of gradients, and the weights\n"
         "after three steps must agree. `same bits` holds for losses and weights; norms are sums over shards, and agree to 1e-6. A number\n"
         "is the largest difference that is allowed, relative to the largest value of a tensor. What is compared with FSDP2 are full state "
         "dicts\n"
         "of both, of the model and of the optimizer.\n\n"
         "The last column is what a rank receives in one step, by formula and as counted: bytes gathered + reduced, and + all-reduced "
         "where\n"
         "there are replicas. If each of n ranks has a part of s bytes of a unit, each gather and each reduction of it costs (n - 1) s. A\n"
         "unit is gathered in forward, and in backward if it was resharded. The root is gathered once. The two differ in this:\n\n"
         "- FSDP2 divides each parameter between rows and pads it. Tessera divides a whole unit at any value and pads parameters to 64\n"
         "  bytes, which shows only in models as small as these.\n"
         "- Tessera does not reshard the unit with which forward ends and backward begins, and does not gather a unit in backward whose\n"
         "  weights no gradient needs.\n"
         "- Tessera sends gradients in their own dtype and adds them in float32. FSDP2 sends what it adds.\n\n"
         "This page is made from the tests: `TESSERA_TEST_WRITE_PAGES=1 ./check parity`.\n";
  std::string section;
  for (const auto& test : cases()) {
    if (test.section != section) {
      section = test.section;
      text << "\n## " << section
           << "\n\n| feature | model, ranks | replicated | PyTorch FSDP2 | bytes by formula |\n| --- | --- | --- | --- | --- |\n";
    }
    const auto within = test.get("within", nlohmann::json::object());
    const auto cell = [&](const std::string& side) {
      const auto largest = bound(test, side);
      text << " | ";
      if (largest == 0) {
        text << "same bits";
      } else {
        text << "1e" << std::lround(std::log10(largest));
      }
      if (within.contains(side) && test.has("because")) text << ": " << test.get("because", std::string());
    };
    text << "| " << test.name << " | " << test.model << ", " << test.ranks;
    cell("replicated");
    cell("fsdp2");
    if (test.has("fsdp2")) text << "; " << test.get("fsdp2", std::string());
    const auto ours = bytes_by_formula(test, Side::Tessera), theirs = bytes_by_formula(test, Side::Fsdp2);
    text << " | " << ours;
    if (ours != theirs) text << "; FSDP2 " << theirs;
    text << " |\n";
  }
  return text.str();
}

TEST(Page, IsMadeOfTheCases) {
  testing::expect_page(TESSERA_ROOT "/docs/tables/parity.md", page(), "parity");
}

}  // namespace
}  // namespace tessera::parity
