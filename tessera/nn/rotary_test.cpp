// Rotary embeddings turn pairs of values by angles that grow with the position; their gradient turns back. Attention in groups is that of
// repeated keys and values, and SwiGLU its formula.
#include "tessera/nn/rotary.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <array>
#include <limits>

#include "tessera/base/error.h"
#include "tessera/nn/attention.h"
#include "tessera/nn/swiglu.h"
#include "tests/testing/transports.h"

namespace tessera::testing::rotary_test {
namespace {

at::Tensor formula(const at::Tensor& x, const nn::RotaryTable& table) {
  const auto pairs = table.cos.size(-1);
  const auto cos = table.cos.unsqueeze(2), sin = table.sin.unsqueeze(2);
  const auto a = x.narrow(-1, 0, pairs), b = x.narrow(-1, pairs, pairs), rest = x.narrow(-1, 2 * pairs, x.size(-1) - 2 * pairs);
  return at::cat({a * cos - b * sin, b * cos + a * sin, rest}, -1).transpose(1, 2);
}

TEST(Rotary, TurnsAndItsGradientTurnsBack) {
  torch::manual_seed(1);
  for (const double part : {1.0, 0.5}) {
    for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
      for (const bool own : {false, true}) {  // positions of each row
        const auto positions = own ? at::randint(0, 50, {2, 9}, at::kLong) : at::arange(4, 13).unsqueeze(0);
        const auto table = nn::rotary_table({.theta = 100, .partial_rotary_factor = part}, 12, positions);
        auto x = at::randn({2, 9, 3, 12}).to(dtype).requires_grad_(), y = x.detach().to(at::kDouble).requires_grad_();
        const auto ours = nn::rotary(x, table), theirs = formula(y, table);
        EXPECT_TRUE(ours.is_contiguous());
        EXPECT_EQ(ours.scalar_type(), dtype);
        const double tolerance = dtype == at::kBFloat16 ? 0.05 : 1e-5;
        EXPECT_TRUE(at::allclose(ours.to(at::kDouble), theirs, tolerance, tolerance));
        const auto weights = at::randn(ours.sizes());
        (ours * weights).sum().backward();
        (theirs * weights).sum().backward();
        EXPECT_TRUE(at::allclose(x.grad().to(at::kDouble), y.grad(), tolerance, tolerance));
      }
    }
  }
}

TEST(Rotary, KeepsScoresOfTheSameDistance) {
  const auto scores_at = [](int64_t begin) {
    torch::manual_seed(2);
    const auto x = at::randn({1, 2, 1, 8}).expand({1, 2, 1, 8});
    const auto turned = nn::rotary(x, nn::rotary_table({}, 8, at::arange(begin, begin + 2).unsqueeze(0)));
    return turned.matmul(turned.transpose(-1, -2));
  };
  EXPECT_TRUE(at::allclose(scores_at(0), scores_at(1000), 1e-3, 1e-3));
}

TEST(Rotary, RefusesHeadsThatCantBePaired) {
  EXPECT_THAT(message_of<UsageError>([] { nn::rotary_table({.partial_rotary_factor = 0.25}, 12, at::arange(3).unsqueeze(0)); }),
              ::testing::HasSubstr("3 of the 12 values of a head can't be turned in pairs"));
}

TEST(Rotary, RefusesTablesOfOtherPositions) {
  const auto table_of = [](int64_t batch, int64_t length, int64_t size) {
    return nn::rotary_table({}, size, at::arange(length).unsqueeze(0).expand({batch, length}));
  };
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    const auto x = at::randn({2, 5, 2, 8}).to(dtype);
    for (const auto& [batch, length, size] : {std::array<int64_t, 3>{1, 3, 8}, {1, 6, 8}, {3, 5, 8}, {1, 5, 10}}) {
      EXPECT_THAT(message_of<UsageError>([&] { nn::rotary(x, table_of(batch, length, size)); }),
                  ::testing::HasSubstr("does not fit values of [2, 5, 2, 8]"));
    }
    EXPECT_THAT(message_of<UsageError>([&] {
                  nn::rotary(x, {table_of(1, 5, 8).cos, table_of(1, 5, 4).sin});
                }),
                ::testing::HasSubstr("[1, 5, 2]"));
    EXPECT_THAT(message_of<UsageError>([&] { nn::rotary(x, {}); }), ::testing::HasSubstr("undefined"));
    auto learned = table_of(1, 5, 8);
    learned.cos.requires_grad_();
    EXPECT_THAT(message_of<UsageError>([&] { nn::rotary(x, learned); }), ::testing::HasSubstr("a table gets no gradient"));
    const auto wide = table_of(1, 5, 8);
    EXPECT_TRUE(at::equal(nn::rotary(x, {wide.cos.to(at::kDouble), wide.sin.to(at::kDouble)}), nn::rotary(x, wide)));
  }
}

TEST(GroupedAttention, RefusesWhatDoesNotBelongTogether) {
  const auto make = [](int64_t heads, int64_t length = 6) { return at::randn({2, heads, length, 8}); };
  const auto said = [&](int64_t heads, int64_t keys, const nn::GroupedAttention& options) {
    return message_of<UsageError>([&] { nn::grouped_attention(make(heads), make(2, keys), make(2, keys), options); });
  };
  using ::testing::HasSubstr;
  const auto mask = at::zeros({1, 1, 6, 6});
  const std::vector<std::vector<int64_t>> one_row = {{1, 5}}, short_row = {{6}, {1, 4}}, fits = {{6}, {1, 5}};
  EXPECT_THAT(said(4, 6, {.documents = &one_row}), HasSubstr("documents of 1 rows for a batch of 2"));
  EXPECT_THAT(said(4, 6, {.documents = &short_row}), HasSubstr("row 1 has documents of 1 + 4 tokens, for 6 queries and 6 keys"));
  EXPECT_THAT(said(4, 7, {.documents = &fits}), HasSubstr("for 6 queries and 7 keys"));
  EXPECT_THAT(said(4, 6, {.mask = mask, .causal = true}), HasSubstr("so causal can't be set with it"));
  EXPECT_THAT(said(4, 6, {.mask = mask, .documents = &fits}), HasSubstr("so documents can't be set with it"));
  EXPECT_THAT(said(3, 6, {}), HasSubstr("queries of [2, 3, 6, 8], keys of [2, 2, 6, 8]"));
}

TEST(GroupedAttention, IsThatOfRepeatedKeysAndValues) {
  torch::manual_seed(4);
  const auto make = [](int64_t heads, int64_t length) { return at::randn({2, heads, length, 8}).requires_grad_(); };
  auto seen_keys = at::rand({2, 1, 5, 7}) > 0.3;
  seen_keys.select(-1, 0).fill_(true);
  const auto mask = at::zeros({2, 1, 5, 7}).masked_fill_(seen_keys.logical_not(), -std::numeric_limits<double>::infinity());
  struct Case {
    int64_t keys;
    at::Tensor mask;
    bool causal;
  };
  for (const auto& [keys, seen, causal] : {Case{5, {}, false}, {5, {}, true}, {7, mask, false}, {7, mask.narrow(0, 0, 1), false}}) {
    auto q = make(6, 5), k = make(2, keys), v = make(2, keys);
    const auto ours = nn::grouped_attention(q, k, v, {.mask = seen, .causal = causal});
    const auto again = at::scaled_dot_product_attention(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1),
                                                        seen.defined() ? std::optional(seen) : std::nullopt, 0, causal)
                           .transpose(1, 2)
                           .flatten(2);
    EXPECT_TRUE(at::allclose(ours, again, 1e-5, 1e-6));
    const auto weights = at::randn(ours.sizes());
    const auto mine = torch::autograd::grad({(ours * weights).sum()}, {q, k, v}),
               theirs = torch::autograd::grad({(again * weights).sum()}, {q, k, v});
    for (size_t i = 0; i < mine.size(); i++) EXPECT_TRUE(at::allclose(mine[i], theirs[i], 1e-4, 1e-5)) << i;
  }
}

TEST(GroupedAttention, CapsScores) {
  torch::manual_seed(9);
  const std::vector<std::vector<int64_t>> documents = {{2, 4}, {6}};
  const auto unseen = at::full({1, 1, 6, 6}, -std::numeric_limits<double>::infinity());
  const auto window = unseen.triu(1) + unseen.tril(-3);
  struct Case {
    int64_t batch, length;
    nn::GroupedAttention options;
  };
  for (auto [batch, length, options] :
       {Case{2, 6, {.causal = true}}, {2, 6, {}}, {2, 6, {.documents = &documents}}, {2, 6, {.mask = window}}, {1, 1500, {.causal = true}}}) {
    options.scale = 0.4;
    options.softcap = 1.5;
    const auto make = [&](int64_t heads) { return at::randn({batch, heads, length, 8}).requires_grad_(); };
    auto q = make(4), k = make(2), v = make(2);
    auto seen = options.causal ? at::ones({length, length}, at::kBool).tril() : at::ones({length, length}, at::kBool);
    if (options.mask.defined()) seen = window == 0;
    if (options.documents != nullptr) {
      const auto first = at::arange(6) < 2;
      const auto own = seen.tril() & (first.unsqueeze(0) == first.unsqueeze(1));
      seen = at::stack({own, seen.tril()}).unsqueeze(1);
    }
    const auto scores = ((q.matmul(k.repeat_interleave(2, 1).transpose(2, 3)) * 0.4) / 1.5).tanh() * 1.5;
    const auto shares = scores.masked_fill(seen.logical_not(), -std::numeric_limits<double>::infinity()).softmax(-1);
    const auto theirs = shares.matmul(v.repeat_interleave(2, 1)).transpose(1, 2).flatten(2);
    const auto ours = nn::grouped_attention(q, k, v, options);
    EXPECT_TRUE(at::allclose(ours, theirs, 1e-5, 1e-6)) << length;
    const auto weights = at::randn(ours.sizes());
    const auto mine = torch::autograd::grad({(ours * weights).sum()}, {q, k, v}),
               other = torch::autograd::grad({(theirs * weights).sum()}, {q, k, v});
    for (size_t i = 0; i < mine.size(); i++) EXPECT_TRUE(at::allclose(mine[i], other[i], 1e-4, 1e-5)) << length << " " << i;
  }
}

TEST(GroupedAttention, OfBfloat16IsThatOfFloat32) {
  torch::manual_seed(6);
  const auto make = [](int64_t heads) { return at::randn({2, heads, 5, 8}).to(at::kBFloat16).requires_grad_(); };
  const auto q = make(6), k = make(2), v = make(2);
  const auto wide = [](const at::Tensor& x) { return x.detach().to(at::kFloat).requires_grad_(); };
  const auto a = wide(q), b = wide(k), c = wide(v);
  const auto ours = nn::wide_attention(q, k, v, {.causal = true}), expected = nn::grouped_attention(a, b, c, {.causal = true});
  EXPECT_TRUE(at::equal(ours, expected.to(at::kBFloat16)));
  ours.to(at::kFloat).square().sum().backward();
  expected.to(at::kBFloat16).to(at::kFloat).square().sum().backward();
  for (const auto& [narrow, whole] : {std::pair(q, a), std::pair(k, b), std::pair(v, c)})
    EXPECT_TRUE(at::equal(narrow.grad(), whole.grad().to(at::kBFloat16)));
}

TEST(GroupedAttention, StaysWithinDocuments) {
  torch::manual_seed(5);
  const auto make = [](int64_t heads) { return at::randn({2, heads, 6, 8}).requires_grad_(); };
  auto q = make(4), k = make(2), v = make(2);
  const std::vector<std::vector<int64_t>> documents = {{1, 3, 2}, {6}};
  const auto of_token = at::tensor({0, 1, 1, 1, 2, 2, 0, 0, 0, 0, 0, 0}, at::kLong).view({2, 6});
  const auto seen = (of_token.unsqueeze(2) == of_token.unsqueeze(1)).unsqueeze(1) & at::ones({6, 6}, at::kBool).tril();
  const auto mask = at::zeros({2, 1, 6, 6}).masked_fill_(seen.logical_not(), -std::numeric_limits<double>::infinity());
  const auto ours = nn::grouped_attention(q, k, v, {.documents = &documents}), theirs = nn::grouped_attention(q, k, v, {.mask = mask});
  EXPECT_TRUE(at::allclose(ours, theirs, 1e-5, 1e-6));
  const auto weights = at::randn(ours.sizes());
  const auto mine = torch::autograd::grad({(ours * weights).sum()}, {q, k, v}),
             other = torch::autograd::grad({(theirs * weights).sum()}, {q, k, v});
  for (size_t i = 0; i < mine.size(); i++) EXPECT_TRUE(at::allclose(mine[i], other[i], 1e-4, 1e-5)) << i;
}

TEST(SwiGlu, IsItsFormula) {
  for (const bool gelu : {false, true}) {
    auto gate = at::randn({3, 5}).requires_grad_(), up = at::randn({3, 5}).requires_grad_();
    const auto ours = gelu ? nn::geglu(gate, up) : nn::swiglu(gate, up), theirs = (gelu ? at::gelu(gate, "tanh") : at::silu(gate)) * up;
    EXPECT_TRUE(at::allclose(ours, theirs));
    const auto weights = at::randn({3, 5});
    const auto mine = torch::autograd::grad({(ours * weights).sum()}, {gate, up}),
               other = torch::autograd::grad({(theirs * weights).sum()}, {gate, up});
    for (size_t i = 0; i < 2; i++) EXPECT_TRUE(at::allclose(mine[i], other[i], 1e-5, 1e-6));
  }
}

}  // namespace
}  // namespace tessera::testing::rotary_test
