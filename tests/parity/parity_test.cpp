// Trains each case of cases.json with PyTorch's own FSDP2, with Tessera, and replicated, and compares the results. docs/parity.md is made of it.
#include <gtest/gtest.h>

#include <iostream>
#include <sstream>

#include "case.h"
#include "formula.h"
#include "tessera/base/process.h"
#include "tessera/testing/folder.h"
#include "tessera/testing/net.h"
#include "tessera/testing/page.h"
#include "train.h"

namespace tessera::parity {
namespace {

/// What fsdp2.py has saved, by case. Run once for all tests.
const std::map<std::string, at::Tensor>& fsdp2() {
  static const auto result = [] {
    const testing::Folder folder;
    const auto path = folder.path() / "result.pt";
    Process process({TESSERA_TEST_PYTHON, TESSERA_PARITY_FOLDER "/fsdp2.py", TESSERA_PARITY_FOLDER "/cases.json", path}, {{"OMP_NUM_THREADS", "1"}},
                    Process::Output::Capture);
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

std::vector<double> doubles(const at::Tensor& tensor) {
  return {tensor.data_ptr<double>(), tensor.data_ptr<double>() + tensor.numel()};
}

Result fsdp2_result(const Case& test) {
  Result result;
  const auto get = [&](const std::string& what) { return fsdp2().at(test.name + "/" + what); };
  result.losses = doubles(get("losses"));
  result.norms = doubles(get("norms"));
  result.received = {.gathered = get("gathered").item<int64_t>(),
                     .reduced = get("reduced").item<int64_t>(),
                     .all_reduced = get("all_reduced").item<int64_t>()};
  const auto prefix = test.name + "/state/";
  for (const auto& [name, tensor] : fsdp2()) {
    if (name.starts_with(prefix)) result.state[name.substr(prefix.size())] = tensor;
  }
  return result;
}

double difference(double one, double other) {
  if (one == other || (!std::isfinite(one) && !std::isfinite(other))) return 0;
  return std::abs(one - other) / std::abs(other);
}

/// The largest difference: of losses and norms relative to themselves, of weights relative to the largest of their tensor.
double difference(const Result& actual, const Result& expected) {
  EXPECT_EQ(actual.losses.size(), expected.losses.size());
  EXPECT_EQ(actual.norms.size(), expected.norms.size());
  double largest = 0;
  for (size_t i = 0; i < actual.losses.size(); i++) largest = std::max(largest, difference(actual.losses[i], expected.losses[i]));
  for (size_t i = 0; i < actual.norms.size(); i++) largest = std::max(largest, difference(actual.norms[i], expected.norms[i]));
  for (const auto& [name, tensor] : expected.state) {
    if (!actual.state.contains(name)) {
      ADD_FAILURE() << name << " is missing";
      continue;
    }
    const auto one = actual.state.at(name).to(at::kDouble), other = tensor.to(at::kDouble);
    largest = std::max(largest, ((one - other).abs().max() / other.abs().max().clamp_min(1e-30)).item<double>());
  }
  return largest;
}

class Cases : public ::testing::TestWithParam<Case> {};

TEST_P(Cases, TrainAsPyTorchDoes) {
  const auto& test = GetParam();
  const auto expected = fsdp2_result(test);
  testing::with_ranks(test.ranks, [&](const Communicator& world) {
    const auto replicated = train_replicated(world, test);
    const auto actual = train_with_tessera(world, test);
    if (world.rank() != 0) return;
    std::cout.precision(9);
    std::cout << test.name << ": " << difference(actual, replicated) << " " << difference(actual, expected) << "\n";
    for (size_t i = 0; i < actual.losses.size(); i++) std::cout << "   " << actual.losses[i] << " " << replicated.losses[i] << " " << expected.losses[i] << "\n";
    for (size_t i = 0; i < actual.norms.size(); i++) std::cout << "   " << actual.norms[i] << " " << replicated.norms[i] << " " << expected.norms[i] << "\n";
    for (const auto& [name, value] : expected.state) {
      const auto a = actual.state.at(name), b = replicated.state.at(name);
      const auto d = [](at::Tensor x, at::Tensor y) { return (x.to(at::kDouble) - y.to(at::kDouble)).abs().max().item<double>(); };
      if (!at::equal(a.to(at::kFloat), b.to(at::kFloat)) || d(a, value) > 1e-5) std::cout << "   " << name << " " << d(a, b) << " " << d(a, value) << " max " << value.abs().max().item<double>() << "\n";
    }
    std::cout << "   tessera " << actual.received << "; formula " << bytes_by_formula(test, Side::Tessera) << "\n   fsdp2   " << expected.received
              << "; formula " << bytes_by_formula(test, Side::Fsdp2) << "\n";
  });
}

INSTANTIATE_TEST_SUITE_P(, Cases, ::testing::ValuesIn(cases()), [](const auto& info) { return "No" + std::to_string(info.index); });

}  // namespace
}  // namespace tessera::parity
