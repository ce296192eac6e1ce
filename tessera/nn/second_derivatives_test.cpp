// A table over all functions of this folder: gradients that are differentiated again are right, or refused by name, and docs/models.md says
// which. On a rank without rows, parameters get zeros as gradients, because the other ranks wait for them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <functional>
#include <map>
#include <regex>
#include <set>

#include "tessera/base/error.h"
#include "tessera/comm/self/self.h"
#include "tessera/nn/attention.h"
#include "tessera/nn/collectives.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/linear_cross_entropy.h"
#include "tessera/nn/lora.h"
#include "tessera/nn/lora_layer.h"
#include "tessera/nn/quantize.h"
#include "tessera/nn/rms_norm.h"
#include "tessera/nn/rotary.h"
#include "tessera/nn/swiglu.h"
#include "tessera/nn/sync_batch_norm.h"
#include "tests/testing/folder.h"
#include "tests/testing/transports.h"

namespace tessera::testing::second_derivatives_test {
namespace {

using Tensors = std::vector<at::Tensor>;
using Act = std::function<at::Tensor(const Tensors& operands)>;

enum class Verdict { Right, Refused, RefusedByLibtorch };

struct Row {
  std::string function;            // as docs/models.md names it
  std::vector<std::string> names;  // its names in the headers
  Verdict verdict = Verdict::Right;
  std::vector<std::vector<int64_t>> sizes;  // of the operands, each with a gradient; the first one has rows
  Act act;
  Act formula = {};  // the same by libtorch's operators
  std::string says = {};
  bool needs_rows = false;
  double within = 1e-4;
};

constexpr double kEps = 1e-5;

nn::RotaryTable table_for(const at::Tensor& x) {
  return nn::rotary_table({.theta = 100}, x.size(-1), at::arange(x.size(1)).unsqueeze(0));
}

at::Tensor turned(const at::Tensor& x) {
  const auto table = table_for(x);
  const auto cos = table.cos.unsqueeze(2), sin = table.sin.unsqueeze(2), a = x.chunk(2, -1)[0], b = x.chunk(2, -1)[1];
  return at::cat({a * cos - b * sin, b * cos + a * sin}, -1).transpose(1, 2);
}

at::Tensor normed(const at::Tensor& x, const at::Tensor& weight) {
  return x * (x.square().mean(-1, true) + kEps).rsqrt() * weight;
}

at::Tensor targets_for(const at::Tensor& x) {
  return at::arange(x.size(0)).remainder(5);
}

/// 6 -> 5 with an adapter.
struct Adapted {
  explicit Adapted(bool dora) {
    torch::manual_seed(7);
    layer = torch::nn::Linear(6, 5);
    net->push_back("layer", layer);
    lora::apply(net, {.r = 2, .lora_alpha = 3, .use_dora = dora, .layers = {.target_modules = {"layer"}}});
    const torch::NoGradGuard no_grad;
    for (auto& item : net->named_parameters()) {
      if (item.key().find("lora_") != std::string::npos) item.value().add_(at::randn(item.value().sizes()) * 0.3);
    }
  }
  at::Tensor part(const std::string& kind) { return net->named_parameters()["layer." + kind + ".default.weight"].detach(); }
  at::Tensor formula(const at::Tensor& x, bool dora) {
    auto weight = layer->weight.detach() + 1.5 * part("lora_B").mm(part("lora_A"));
    if (dora) weight = weight * (part("lora_magnitude_vector") / weight.norm(2, 1)).unsqueeze(1);
    return at::linear(x, weight.to(x.scalar_type()), layer->bias.detach().to(x.scalar_type()));
  }
  torch::nn::Sequential net;
  torch::nn::Linear layer{nullptr};
};

Row adapted(const std::string& function, bool dora) {
  return {.function = function,
          .names = {"merged", "delta"},
          .sizes = {{3, 6}},
          .act = [dora](const Tensors& t) { return Adapted(dora).net->forward(t[0]); },
          .formula = [dora](const Tensors& t) { return Adapted(dora).formula(t[0], dora); }};
}

Row collective(const std::string& name, const std::function<at::Tensor(const at::Tensor&, const Communicator&)>& act) {
  return {.function = "nn::" + name,
          .names = {name},
          .sizes = {{3, 4}},
          .act = [act](const Tensors& t) { return act(t[0], self_world()); },
          .formula = [](const Tensors& t) { return t[0] * 1; }};
}

std::vector<Row> rows() {
  const std::string none = "is not implemented";
  const std::vector<std::vector<int64_t>> heads = {{2, 4, 3, 8}, {2, 2, 3, 8}, {2, 2, 3, 8}};
  return {
      {"nn::linear",
       {"linear", "rows_of"},
       Verdict::Right,
       {{3, 6}},
       [](const Tensors& t) {
         torch::manual_seed(7);
         return nn::linear(torch::nn::Linear(6, 5), t[0]);
       },
       [](const Tensors& t) {
         torch::manual_seed(7);
         torch::nn::Linear layer(6, 5);
         return at::linear(t[0], layer->weight.to(t[0].scalar_type()), layer->bias.to(t[0].scalar_type()));
       }},
      {"nn::rotary",
       {"rotary"},
       Verdict::Right,
       {{2, 3, 2, 8}},
       [](const Tensors& t) { return nn::rotary(t[0], table_for(t[0])); },
       [](const Tensors& t) { return turned(t[0]); }},
      {"nn::rms_norm",
       {"rms_norm"},
       Verdict::Right,
       {{3, 6}, {6}},
       [](const Tensors& t) { return nn::rms_norm(t[0], t[1], kEps); },
       [](const Tensors& t) { return normed(t[0], t[1]); }},
      {"nn::RmsNorm",
       {"RmsNorm"},
       Verdict::Right,
       {{3, 6}},
       [](const Tensors& t) { return nn::RmsNorm(6, kEps)(t[0]); },
       [](const Tensors& t) { return normed(t[0], at::ones({6}, t[0].options())); }},
      {"nn::swiglu",
       {"swiglu"},
       Verdict::Right,
       {{3, 6}, {3, 6}},
       [](const Tensors& t) { return nn::swiglu(t[0], t[1]); },
       [](const Tensors& t) { return t[0] * at::sigmoid(t[0]) * t[1]; }},
      {"nn::geglu",
       {"geglu"},
       Verdict::Right,
       {{3, 6}, {3, 6}},
       [](const Tensors& t) { return nn::geglu(t[0], t[1]); },
       [](const Tensors& t) { return at::gelu(t[0], "tanh") * t[1]; }},
      {"nn::softcapped",
       {"softcapped"},
       Verdict::Right,
       {{3, 6}},
       [](const Tensors& t) { return nn::softcapped(t[0], 2); },
       [](const Tensors& t) { return 2 * (t[0] / 2).tanh(); }},
      {"nn::linear_cross_entropy",
       {"linear_cross_entropy", "linear_cross_entropies"},
       Verdict::Refused,
       {{3, 6}, {5, 6}},
       [](const Tensors& t) { return nn::linear_cross_entropy(t[0], t[1], targets_for(t[0])); },
       {},
       "linear_cross_entropy makes its gradients in forward"},
      {"nn::SyncBatchNorm",
       {"SyncBatchNorm"},
       Verdict::Refused,
       {{3, 6}},
       [](const Tensors& t) { return nn::SyncBatchNorm(torch::nn::BatchNormOptions(6), self_world())(t[0]); },
       {},
       "second derivatives of batch normalization over all ranks",
       true},
      {"nn::grouped_attention",
       {"grouped_attention"},
       Verdict::RefusedByLibtorch,
       heads,
       [](const Tensors& t) { return nn::grouped_attention(t[0], t[1], t[2], {.causal = true}); },
       {},
       none},
      {"nn::wide_attention",
       {"wide_attention"},
       Verdict::RefusedByLibtorch,
       heads,
       [](const Tensors& t) { return nn::wide_attention(t[0], t[1], t[2], {.causal = true}); },
       {},
       none},
      {"nn::SelfAttention",
       {"SelfAttention"},
       Verdict::RefusedByLibtorch,
       {{2, 3, 8}},
       [](const Tensors& t) { return nn::SelfAttention(nn::SelfAttentionOptions{.width = 8, .heads = 2})(t[0]); },
       {},
       none},
      {"nn::quantize",
       {"quantized", "dequantized"},
       Verdict::Right,
       {{3, 6}},
       [](const Tensors& t) {
         torch::manual_seed(7);
         torch::nn::Sequential net(torch::nn::Linear(torch::nn::LinearOptions(6, 5).bias(false)));
         nn::quantize(net);
         return net->forward(t[0]);
       },
       [](const Tensors& t) {
         torch::manual_seed(7);
         torch::nn::Linear layer(torch::nn::LinearOptions(6, 5).bias(false));
         const auto held = nn::quantized(nn::Quantization::Nf4, layer->weight.detach());
         return at::linear(t[0], nn::dequantized(nn::Quantization::Nf4, held, {5, 6}, at::kFloat).to(t[0].scalar_type()));
       }},
      adapted("lora::apply", /*dora=*/false),
      adapted("lora::apply", /*dora=*/true),
      collective("all_reduce", [](const at::Tensor& x, const Communicator& world) { return nn::all_reduce(x, world); }),
      collective("all_gather", [](const at::Tensor& x, const Communicator& world) { return nn::all_gather(x, world); }),
      collective("reduce_scatter", [](const at::Tensor& x, const Communicator& world) { return nn::reduce_scatter(x, world); }),
      collective("broadcast", [](const at::Tensor& x, const Communicator& world) { return nn::broadcast(x, world); }),
  };
}

Tensors operands_of(const Row& row, at::ScalarType dtype) {
  torch::manual_seed(3);
  Tensors operands;
  for (const auto& sizes : row.sizes) operands.push_back(at::randn(sizes).to(dtype).requires_grad_());
  return operands;
}

/// The gradients of a penalty on gradients.
Tensors twice(const Act& act, const Tensors& operands) {
  const auto y = act(operands);
  const auto weights = at::arange(y.numel()).view(y.sizes()).to(y.scalar_type()).add(1).cos();
  const auto once = torch::autograd::grad({(y.pow(3) * weights).sum()}, operands, {}, /*retain_graph=*/true, /*create_graph=*/true);
  auto penalty = at::zeros({}, y.options());
  for (const auto& each : once) penalty = penalty + each.pow(2).sum();
  return torch::autograd::grad({penalty}, operands);
}

class SecondDerivatives : public ::testing::TestWithParam<Row> {};

TEST_P(SecondDerivatives, AreRightOrRefused) {
  const auto& row = GetParam();
  if (row.verdict != Verdict::Right) {
    const auto act = [&] { twice(row.act, operands_of(row, at::kFloat)); };
    const auto said = row.verdict == Verdict::Refused ? message_of<UsageError>(act) : message_of<c10::Error>(act);
    EXPECT_THAT(said, ::testing::HasSubstr(row.says));
    return;
  }
  const auto ours = twice(row.act, operands_of(row, at::kFloat)), theirs = twice(row.formula, operands_of(row, at::kDouble));
  for (size_t i = 0; i < ours.size(); i++) {
    const auto most = theirs[i].abs().max().item<double>();
    EXPECT_LT((ours[i].to(at::kDouble) - theirs[i]).abs().max().item<double>(), row.within * most) << i;
  }
}

TEST_P(SecondDerivatives, OfNoRowsTheFirstAreZeros) {
  auto row = GetParam();
  if (row.needs_rows) GTEST_SKIP() << "refused where no rank has rows";
  const auto rows = row.sizes[0][0];
  for (auto& sizes : row.sizes) {
    if (row.sizes.size() == 1 || row.verdict == Verdict::RefusedByLibtorch || &sizes == row.sizes.data() || row.function.ends_with("glu"))
      sizes[0] = sizes[0] == rows ? 0 : sizes[0];
  }
  const auto operands = operands_of(row, at::kFloat);
  row.act(operands).sum().backward();
  for (size_t i = 0; i < operands.size(); i++) {
    ASSERT_TRUE(operands[i].grad().defined()) << i;
    EXPECT_TRUE(at::equal(operands[i].grad(), at::zeros_like(operands[i]))) << i;
  }
}

std::string name_of(const ::testing::TestParamInfo<Row>& info) {
  return std::regex_replace(info.param.function, std::regex("[^a-zA-Z]+"), "_") + "_" + std::to_string(info.index);
}

INSTANTIATE_TEST_SUITE_P(Functions, SecondDerivatives, ::testing::ValuesIn(rows()), name_of);

TEST(SecondDerivativesPage, SaysWhatEachFunctionOfTheHeadersDoes) {
  std::set<std::string> known;
  std::map<Verdict, std::string> lines;
  const auto page = read_file(TESSERA_ROOT "/docs/models.md");
  for (const auto& [verdict, word] :
       {std::pair(Verdict::Right, "right"), {Verdict::Refused, "refused"}, {Verdict::RefusedByLibtorch, "refused by libtorch"}}) {
    const auto begin = page.find(std::string("\n| ") + word + " | ");
    ASSERT_NE(begin, std::string::npos) << word;
    lines[verdict] = page.substr(begin + 1, page.find('\n', begin + 1) - begin - 1);
  }
  for (const auto& row : rows()) {
    known.insert(row.names.begin(), row.names.end());
    EXPECT_THAT(lines.at(row.verdict), ::testing::HasSubstr("`" + row.function + "`"));
  }
  const std::regex declared(R"((?:^|\n)(?:inline )?at::Tensor (\w+)\(|\nTORCH_MODULE\((\w+)\))");
  size_t found = 0;
  for (const auto& entry : std::filesystem::directory_iterator(TESSERA_ROOT "/tessera/nn")) {
    if (entry.path().extension() != ".h") continue;
    const auto text = read_file(entry.path());
    for (std::sregex_iterator each(text.begin(), text.end(), declared), end; each != end; ++each) {
      const auto name = (*each)[1].matched ? (*each)[1].str() : (*each)[2].str();
      EXPECT_TRUE(known.contains(name)) << entry.path() << " has " << name
                                        << ", of which no row says whether its gradients can be differentiated again";
      found++;
    }
  }
  EXPECT_GE(found, known.size());
}

}  // namespace
}  // namespace tessera::testing::second_derivatives_test
