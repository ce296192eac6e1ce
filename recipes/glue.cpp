// Fine-tunes a BERT to tell whether two sentences mean the same. How it is sharded comes from the configuration.
#include <fmt/format.h>
#include <tessera/models.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include "glue_flags.h"

namespace {

using namespace tessera;
using models::BertConfig;
using Model = models::BertForSequenceClassification;

constexpr int64_t kEvaluationBatch = 32;  // pairs per rank

data::SentencePairs read(const Flags& flags, data::Split split) {
  if (!flags.fake_data) return data::read_sentence_pairs(flags.data, split);
  return data::fake_sentence_pairs({.count = split == data::Split::Train ? 4000 : 400, .split = split});
}

/// The model's own tokenizer, or one for the words of the data.
data::WordPiece make_tokenizer(const Flags& flags, const data::SentencePairs& train) {
  if (!flags.model.empty()) return data::WordPiece::read(flags.model);
  std::vector<std::string> sentences;
  for (const auto& [first, second] : train.sentences) sentences.insert(sentences.end(), {first, second});
  return data::WordPiece::of_words(sentences, 20'000);
}

BertConfig make_config(const Flags& flags, const data::WordPiece& tokenizer) {
  if (flags.model.empty()) {
    return {.vocab_size = tokenizer.size(),
            .hidden_size = 64,
            .num_hidden_layers = 2,
            .num_attention_heads = 8,
            .intermediate_size = 128,
            .max_position_embeddings = flags.max_length};
  }
  auto config = BertConfig::read(flags.model);
  config.num_labels = 2;
  if (flags.max_length > config.max_position_embeddings) {
    throw ConfigError(fmt::format("--max-length {}: the model in {} takes at most {} tokens", flags.max_length, flags.model.string(),
                                  config.max_position_embeddings));
  }
  if (tokenizer.size() > config.vocab_size) {
    throw ConfigError(fmt::format("{}: vocab.txt has {} tokens, but the model only {}; give a folder in which both belong together",
                                  flags.model.string(), tokenizer.size(), config.vocab_size));
  }
  return config;
}

Model make_model(const Flags& flags, const BertConfig& config, Trainer& trainer) {
  trainer.set_seed(flags.seed);  // the same weights on every rank
  auto model = trainer.make_model([&] { return Model(config); });
  if (!flags.model.empty() && trainer.needs_values()) {
    checkpoint::load_weights(*model, flags.model,
                             {.may_be_missing = {"classifier\\..*"},  // the head is trained for the first time
                              .may_be_unknown = {"cls\\..*", ".*position_ids"},
                              .renamed = model->renames()});
  }
  trainer.prepare(model);
  trainer.set_seed(flags.seed + 1, {.device_specific = true});  // so that dropout differs between ranks
  return model;
}

torch::Tensor scores_of(const Model& model, const data::Samples& batch) {
  const auto parts = batch.inputs.unbind(1);
  return call(model, parts[0], parts[1], parts[2]).to(torch::kFloat);
}

struct Scores {
  double accuracy = 0, f1 = 0;  // in percent
};

Scores scores_over(Model& model, int64_t pairs, const data::Fetch& fetch, int workers, const Trainer& trainer) {
  data::Loader loader(trainer.make_sampler({.size = pairs,
                                            .global_batch = kEvaluationBatch * trainer.num_processes(),
                                            .order = data::Order::AsStored,
                                            .tail = data::Tail::Fill}),
                      fetch, {.workers = workers});
  const auto counts = torch::zeros(
      {2, 2}, torch::TensorOptions(trainer.world().traits().device).dtype(torch::kDouble));  // counts of pairs, by label and answer
  for (const auto& batch : trainer.evaluation(model, loader)) {
    const auto [labels, answers] = trainer.gather_for_metrics({batch.targets, scores_of(model, batch).argmax(1)}, batch);
    counts.index_put_({labels, answers}, torch::ones({}, counts.options()), /*accumulate=*/true);
  }
  const auto right = counts.trace().item<double>(), found = counts[1][1].item<double>();
  const auto same = counts[1].sum().item<double>(), answered = counts.select(1, 1).sum().item<double>();
  return {.accuracy = 100 * right / static_cast<double>(pairs), .f1 = same + answered > 0 ? 200 * found / (same + answered) : 0};
}

int train_and_test(const Flags& flags) {
  Trainer trainer({.log_with = flags.metrics});
  const auto pairs = read(flags, data::Split::Train), dev = read(flags, data::Split::Test);
  const auto tokenizer = make_tokenizer(flags, pairs);
  const auto config = make_config(flags, tokenizer);
  auto model = make_model(flags, config, trainer);
  data::Loader loader(
      trainer.make_sampler(
          {.size = pairs.size(), .global_batch = flags.batch_size * trainer.num_processes(), .tail = data::Tail::Fill, .seed = flags.seed}),
      data::fetch_pairs(pairs, tokenizer, flags.max_length), {.workers = flags.workers, .data = data::fingerprint(pairs)});
  const auto all = *flags.run.epochs * trainer.steps_of_epoch(loader), steps = std::min(all, flags.run.steps.value_or(all));
  const optim::LearningRate rate{.base = flags.lr.value_or(flags.model.empty() ? 2e-3 : 2e-5),
                                 .shape = optim::LearningRate::Shape::Linear,
                                 .warmup = steps / 10,
                                 .steps = steps};
  optim::AdamW optimizer(parameters(*model), {.lr = rate.base});
  trainer.prepare(optimizer, loader);
  if (steps > 0) trainer.prepare(rate);

  const double limit = trainer.settings().is_set("gradient_clipping") ? trainer.settings().number("gradient_clipping") : 1.0;
  const auto evaluate = [&] {
    return scores_over(model, dev.size(), data::fetch_pairs(dev, tokenizer, flags.max_length), flags.workers, trainer);
  };
  train::Run run(trainer, loader, flags.run);
  while (run.next_epoch()) {
    for (const auto& batch : run.batches()) {
      const auto accumulation = trainer.accumulate();
      const auto loss = torch::cross_entropy_loss(scores_of(model, batch), batch.targets);
      trainer.backward(loss);
      const auto norm = limit > 0 ? trainer.clip_grad_norm(limit) : trainer.grad_norm();
      trainer.step();
      run.report({{"loss", loss}, {"grad_norm", norm}});
    }
    if (run.stopped()) break;
    const auto scores = evaluate();
    run.say(fmt::format("epoch {}/{}: accuracy {:.2f} %, F1 {:.2f} %", run.epoch(), *flags.run.epochs, scores.accuracy, scores.f1));
  }
  if (run.stopped()) return 0;

  const auto scores = evaluate();
  trainer.log({{"accuracy", scores.accuracy}, {"f1", scores.f1}});
  run.say(fmt::format("accuracy {:.2f} %, F1 {:.2f} % after {} steps", scores.accuracy, scores.f1, trainer.steps()));
  if (!flags.output.empty()) {
    trainer.save_model(model, flags.output);
    if (trainer.is_main_process()) tokenizer.write(flags.output);
    const bool is_whole = lora::adapters(model).empty();
    if (trainer.is_main_process() && is_whole) config.write(flags.output);
    run.say(fmt::format("wrote the {} to {}", is_whole ? "model" : "adapters", flags.output.string()));
  }
  return status_of(scores.accuracy, flags, run);
}

}  // namespace

int main(int argc, char** argv) {
  cli::Program app(
      "Fine-tunes a BERT to tell whether two sentences mean the same (MRPC). How it is sharded comes from the configuration.", "glue",
      {"tessera launch -n 2 glue --model bert-base-cased --data MRPC --output tuned", "glue --model bert-base-cased --data MRPC"});
  Flags flags;
  declare(app, flags);
  app.add_device_flags();
  return app.run(argc, argv, [&] { return train_and_test(flags); });
}
