// The losses of the recipe for language models: of texts, or of a preference between two answers.
#pragma once

#include <tessera/comm/simulation.h>

#include <cmath>

#include "llama_model.h"

namespace {

constexpr double kLeast = 1e-6;  // the least number of tokens to divide by

/// The rows of a file: texts, or pairs for --preference.
struct Rows {
  int64_t size;
  std::string data;
  data::Fetch fetch;
  at::Tensor reference = {};  // of pairs: llm::log_probabilities() before training, for DPO
};

Rows rows_of(const std::filesystem::path& file, const Flags& flags, const Source& source) {
  llm::TokenFile tokens(file);
  llm::expect_vocabulary(file, tokens.vocabulary(), source.config.vocab_size);
  if (tokens.has_pairs() && flags.preference.empty())
    throw ConfigError(fmt::format("{} has pairs of a chosen and a rejected answer; give --preference dpo or orpo", file.string()));
  if (!tokens.has_pairs() && !flags.preference.empty())
    throw ConfigError(fmt::format("{} has texts, but --preference {} learns from pairs, lines with \"chosen\" and \"rejected\"",
                                  file.string(), flags.preference));
  if (std::ranges::all_of(tokens.tokens(), llm::is_only_read))
    throw ConfigError(fmt::format("{}: none of its tokens is learned, only read; tessera data preview shows what is learned", file.string()));
  const auto of = [](auto rows) { return Rows{.size = rows.size(), .data = rows.data(), .fetch = rows}; };
  if (flags.preference.empty()) return of(llm::PackedRows(std::move(tokens), source.length, flags.packing));
  const llm::PairRows pairs(std::move(tokens), source.length);
  if (pairs.left_out() > 0)
    log(LogLevel::Warning, "{}: {} of {} pairs are left out, because an answer begins after token {}; --length takes more", file.string(),
        pairs.left_out(), pairs.left_out() + pairs.size(), source.length);
  return of(pairs);
}

/// A row of a batch: its tokens, their places in their documents, and which are in documents.
struct Batch {
  at::Tensor tokens, positions, documents, targets;

  explicit Batch(const data::Samples& samples)
      : tokens(samples.inputs.select(1, 0)), positions(samples.inputs.select(1, 1)), documents(samples.inputs.select(1, 2)), targets(samples.targets) {}
  at::Tensor counted() const { return (targets != llm::kIgnored).sum(); }
};

/// The loss of one pass of a rank. The loss of a step is the mean over what is learned in it, tokens or pairs, whose number may differ
/// between ranks and passes.
struct Pass {
  at::Tensor share = {};              // this rank's sum of losses / divisor; a balance of experts counts as all that the pass learns does
  at::Tensor own = {}, counted = {};  // what is learned in this pass: by this rank, and the mean over the ranks
  at::Tensor divisor = {};            // `counted`, or with several passes a constant
  std::vector<train::Measured> measured = {};
};

class Losses {
 public:
  Losses(Model& model, const Flags& flags, Trainer& trainer)
      : model_(model),
        flags_(flags),
        trainer_(trainer),
        passes_(trainer.settings().integer("gradient_accumulation_steps")),
        preference_{.kind = flags.preference == "orpo" ? llm::Preference::Kind::Orpo : llm::Preference::Kind::Dpo, .beta = flags.beta} {}

  /// For DPO, measures the rows of pairs with the model as it is. Called before a run resumes. Collective.
  void refer(Rows& rows) const {
    if (flags_.preference != "dpo") return;
    rows.reference = at::zeros({rows.size, 2}, trainer_.world().traits().device);
    if (Simulation::current() != nullptr || env("TESSERA_XLA_TRACE_ONLY")) return;
    over(rows, std::nullopt, [&](const data::Samples& samples) {
      const llm::PairBatch batch(samples);
      const auto sums = trainer_.gather_for_metrics(llm::log_probabilities(losses_of(batch), batch), samples);
      rows.reference.index_copy_(0, trainer_.gather_for_metrics(batch.numbers, samples), sums);
    });
  }

  Pass pass(const Rows& rows, const data::Samples& samples) const {
    return flags_.preference.empty() ? pass_of_text(Batch(samples)) : pass_of_pairs(rows, llm::PairBatch(samples));
  }

  /// The loss first. Collective.
  train::Values evaluate(const Rows& rows) const {
    const auto device = trainer_.world().traits().device;
    auto sums = at::zeros({flags_.preference.empty() ? 2 : 7}, torch::TensorOptions(device).dtype(torch::kDouble));
    over(rows, llm::kIgnored, [&](const data::Samples& samples) {
      if (flags_.preference.empty()) {
        const Batch batch(samples);
        const auto losses = model_->losses(batch.tokens, batch.targets, {.rows_at_once = flags_.rows_at_once}, {.positions = batch.positions});
        sums += at::stack({losses.sum(), batch.counted()}).to(sums.scalar_type());
      } else {
        const llm::PairBatch batch(samples);
        const auto of = llm::pair_sums(losses_of(batch), batch, preference_, rows.reference);
        sums += at::stack({of.loss, of.pairs, of.text_loss, of.tokens, of.chosen, of.rejected, of.accurate}).to(sums.scalar_type());
      }
    });
    sums = trainer_.reduce(sums).cpu();
    const auto* sum = sums.const_data_ptr<double>();
    const auto of_pairs = [&](int i) { return sum[i] / sum[1]; };
    if (flags_.preference.empty()) return {{"eval_loss", of_pairs(0)}};
    return {{"eval_loss", of_pairs(0) + (sum[3] > 0 ? sum[2] / sum[3] : 0)},
            {"eval_rewards/chosen", of_pairs(4)},
            {"eval_rewards/rejected", of_pairs(5)},
            {"eval_rewards/accuracies", of_pairs(6)},
            {"eval_rewards/margins", of_pairs(4) - of_pairs(5)}};
  }

 private:
  void over(const Rows& rows, std::optional<int64_t> target_of_repeats, const std::function<void(const data::Samples&)>& act) const {
    data::Loader loader(trainer_.make_sampler({.size = rows.size,
                                               .global_batch = flags_.batch_size * trainer_.num_processes(),
                                               .order = data::Order::AsStored,
                                               .tail = data::Tail::Fill}),
                        rows.fetch, {.workers = flags_.workers, .target_of_repeats = target_of_repeats});
    for (const auto& samples : trainer_.evaluation(model_, loader)) act(samples);
  }

  /// Sets divisor and share. `mean`: the loss of a step of this pass alone. If a step has several, each divides by a constant, and the step
  /// by the count at its end.
  void set_share(Pass& pass, const at::Tensor& mean, int64_t most) const {
    pass.divisor = passes_ == 1 ? pass.counted.clamp_min(kLeast) : torch::full_like(pass.counted, most);
    pass.share = passes_ == 1 ? mean : mean * (pass.counted / pass.divisor);
  }

  Pass pass_of_text(const Batch& batch) const {
    Pass pass{.own = batch.counted().to(torch::kFloat)};
    pass.counted = trainer_.reduce(pass.own, Reduce::Mean);
    const auto mean = model_->loss(batch.tokens, batch.targets,
                                   {.z_loss = flags_.z_loss, .rows_at_once = flags_.rows_at_once, .divisor = pass.counted.clamp_min(kLeast)},
                                   {.positions = batch.positions, .counted = batch.documents});
    set_share(pass, mean, batch.targets.numel());
    return pass;
  }

  at::Tensor losses_of(const llm::PairBatch& batch, const models::RouterScores& scores = nullptr) const {
    const auto losses = model_->losses(batch.tokens.flatten(0, 1), batch.next.flatten(0, 1), {.rows_at_once = flags_.rows_at_once},
                                       {.router_scores = scores});
    return losses.unflatten(0, {-1, 2});
  }

  Pass pass_of_pairs(const Rows& rows, const llm::PairBatch& batch) const {
    const auto& experts = model_->model->config.experts;
    const auto scores = experts && experts->output_router_logits ? std::make_shared<std::vector<at::Tensor>>() : nullptr;
    const auto sums = llm::pair_sums(losses_of(batch, scores), batch, preference_, rows.reference);
    const auto counted = trainer_.reduce(at::stack({sums.pairs, sums.tokens}), Reduce::Mean);
    Pass pass{.own = sums.pairs, .counted = counted[0]};
    auto mean = (sums.loss + sums.text_loss * (counted[0] / counted[1].clamp_min(kLeast))) / pass.counted.clamp_min(kLeast);
    if (scores) mean = mean + experts->router_aux_loss_coef * models::balance_loss(*scores, *experts, batch.in_documents());
    set_share(pass, mean, batch.numbers.numel());
    const auto measure = [&](const char* name, const at::Tensor& sum) {
      pass.measured.push_back({name, sum / sums.pairs.clamp_min(kLeast), sums.pairs});
    };
    measure("rewards/chosen", sums.chosen);
    measure("rewards/rejected", sums.rejected);
    measure("rewards/accuracies", sums.accurate);
    measure("rewards/margins", sums.chosen - sums.rejected);
    return pass;
  }

  Model& model_;
  const Flags& flags_;
  Trainer& trainer_;
  const int64_t passes_;
  const llm::Preference preference_;
};

}  // namespace
