// Fine-tunes a BERT to tell whether two sentences mean the same. How it is sharded comes from the configuration.
#include <fmt/format.h>
#include <tessera/models/bert.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <filesystem>

#include "glue_flags.h"

namespace {

using namespace tessera;
using models::BertConfig;
using Model = models::BertForSequenceClassification;

constexpr int kBelowTarget = 21;          // exit status
constexpr double kWarmup = 0.1;           // of all steps
constexpr int64_t kEvaluationBatch = 32;  // pairs per rank

data::SentencePairs read(const Flags& flags, data::Split split) {
  if (!flags.fake_data) return data::read_sentence_pairs(flags.data, split);
  return data::fake_sentence_pairs({.count = split == data::Split::Train ? 4000 : 400, .split = split});
}

/// The model's own, or one for the words of the data.
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
    throw ConfigError(fmt::format("{}: vocab.txt has {} tokens, but the model only {}; they are of different models", flags.model.string(),
                                  tokenizer.size(), config.vocab_size));
  }
  return config;
}

Model make_model(const Flags& flags, const BertConfig& config, Trainer& trainer) {
  trainer.set_seed(flags.seed);  // the same weights on every rank
  auto model = trainer.make_model([&] { return Model(config); });
  if (!flags.model.empty() && trainer.needs_values()) {
    checkpoint::load_weights(*model, flags.model,
                             {.may_be_missing = {"classifier\\..*"},  // it is what is trained for the first time
                              .may_be_unknown = {"cls\\..*", ".*position_ids"},
                              .renamed = model->renames()});
  }
  trainer.prepare(model);
  trainer.set_seed(flags.seed + 1, {.device_specific = true});  // each rank drops out other values
  return model;
}

/// Tokens, mask and types of a batch as {pairs, 3, length}.
data::Fetch fetch_from(const data::SentencePairs& all, const data::WordPiece& tokenizer, int64_t max_length) {
  return [&all, &tokenizer, max_length](std::span<const int64_t> numbers) {
    std::vector<std::pair<std::string, std::string>> pairs;
    std::vector<int64_t> labels;
    for (const auto number : numbers) {
      pairs.push_back(all.sentences.at(static_cast<size_t>(number)));
      labels.push_back(all.labels.at(static_cast<size_t>(number)));
    }
    const auto encoded = tokenizer.encode(pairs, {.max_length = max_length});
    return data::Samples{.inputs = torch::stack({encoded.tokens, encoded.mask, encoded.types}, 1), .targets = torch::tensor(labels)};
  };
}

torch::Tensor scores_of(const Model& model, const data::Samples& batch) {
  const auto parts = batch.inputs.unbind(1);
  return call(model, parts[0], parts[1], parts[2]).to(torch::kFloat);
}

struct Scores {
  double accuracy = 0, f1 = 0;  // in percent
};

/// A text that is saved with the run.
struct Course {
  std::string text;
  std::string save() const { return text; }
  static Course load(const std::string& text) { return {.text = text}; }
};

/// One run, from its flags to what it has learnt.
class GlueRun {
 public:
  explicit GlueRun(const Flags& flags)
      : flags_(flags),
        train_(read(flags, data::Split::Train)),
        dev_(read(flags, data::Split::Test)),
        tokenizer_(make_tokenizer(flags, train_)),
        config_(make_config(flags, tokenizer_)),
        model_(make_model(flags, config_, trainer_)),
        loader_(data::Sampler({.size = train_.size(),
                               .global_batch = flags.batch_size * trainer_.num_processes(),
                               .local_ranks = trainer_.world().local_ranks(),
                               .ranks = trainer_.num_processes(),
                               .tail = data::Tail::Fill,
                               .seed = flags.seed}),
                fetch_from(train_, tokenizer_, flags.max_length), {.workers = flags.workers}),
        optimizer_(parameters(*model_), {.lr = learning_rate().base}) {
    trainer_.prepare(optimizer_, loader_);
    if (flags.epochs > 0) trainer_.prepare(learning_rate());
  }

  int run() {
    trainer_.register_for_checkpointing(course_);
    const bool resumes = flags_.resume || (restart_count() > 0 && !flags_.state.empty());
    const bool is_saved = !flags_.state.empty() && trainer_.has_state(flags_.state);
    if (resumes && is_saved) {
      resume();
    } else if (resumes) {
      say("nothing saved in {} yet, starting anew", flags_.state.string());
    } else if (is_saved) {
      throw ConfigError(
          fmt::format("there is a {} already; go on from it with --resume, or give another --save-state", flags_.state.string()));
    }
    while (loader_.position().epoch < flags_.epochs) {
      const auto epoch = loader_.position().epoch + 1;
      train_epoch(epoch);
      if (!flags_.state.empty()) trainer_.save_state(flags_.state);
      const auto scores = evaluate();
      say("epoch {}/{}: accuracy {:.2f} %, F1 {:.2f} %", epoch, flags_.epochs, scores.accuracy, scores.f1);
    }
    return finish();
  }

 private:
  optim::LearningRate learning_rate() const {
    const auto accumulated = trainer_.settings().integer("gradient_accumulation_steps");
    const auto steps = flags_.epochs * ((loader_.batches() + accumulated - 1) / accumulated);
    return {.base = flags_.lr.value_or(flags_.model.empty() ? 2e-3 : 2e-5),
            .shape = optim::LearningRate::Shape::Linear,
            .warmup = static_cast<int64_t>(kWarmup * static_cast<double>(steps)),
            .steps = steps};
  }

  // What must be the same for a run to go on: the samples would come in another order.
  std::string course() const {
    return fmt::format("seed {}, {} samples, {} a step of each rank", flags_.seed, train_.size(), flags_.batch_size);
  }

  void resume() {
    trainer_.load_state(flags_.state);
    if (course_.text != course()) {
      throw ConfigError(fmt::format("{} is of a run with {}, this one has {}; give the same flags, or another --save-state",
                                    flags_.state.string(), course_.text, course()));
    }
    say("going on from {} after {} steps", flags_.state.string(), trainer_.steps());
  }

  void train_epoch(int64_t epoch) {
    train::Progress progress({.title = fmt::format("epoch {}/{}", epoch, flags_.epochs),
                              .steps = loader_.batches(),
                              .start = loader_.position().batch,
                              .items_per_step = flags_.batch_size * trainer_.num_processes(),
                              .line_every = 10 * flags_.log_steps,
                              .rank = trainer_.process_index()});
    for (const auto& batch : loader_) {
      const auto accumulation = trainer_.accumulate();
      const auto loss = torch::cross_entropy_loss(scores_of(model_, batch), batch.targets);
      trainer_.backward(loss);
      const auto norm = clipping_ > 0 ? trainer_.clip_grad_norm(clipping_) : trainer_.grad_norm();
      if (trainer_.step() && trainer_.steps() % flags_.log_steps == 0) report(loss, norm);
      progress.update(loader_.position().batch, shown_);
    }
    progress.update(loader_.batches(), shown_);
  }

  void report(const torch::Tensor& loss, const torch::Tensor& norm) {
    const auto mean = trainer_.reduce(loss.to(torch::kDouble), Reduce::Mean).item<double>();
    const train::Value lr = {"lr", optimizer_.lr()}, grad_norm = {"grad_norm", norm.item<double>()};
    trainer_.log({{"loss", mean}, lr, grad_norm});
    shown_ = {{"loss", running_loss_.add(mean)}, grad_norm, lr, train::memory()};
  }

  Scores evaluate() {
    const torch::NoGradGuard no_grad;
    model_->eval();
    data::Loader loader(data::Sampler({.size = dev_.size(),
                                       .global_batch = kEvaluationBatch * trainer_.num_processes(),
                                       .local_ranks = trainer_.world().local_ranks(),
                                       .ranks = trainer_.num_processes(),
                                       .order = data::Order::AsStored,
                                       .tail = data::Tail::Fill}),
                        fetch_from(dev_, tokenizer_, flags_.max_length), {.workers = flags_.workers});
    loader.place([&](const torch::Tensor& rows) { return trainer_.world().to_local_ranks(rows); });
    torch::Tensor counts = torch::zeros({2, 2}, torch::TensorOptions(trainer_.world().traits().device).dtype(torch::kDouble));  // of labels and answers
    for (const auto& batch : loader) {
      const auto [labels, answers] = trainer_.gather_for_metrics({batch.targets, scores_of(model_, batch).argmax(1)}, batch);
      counts.index_put_({labels, answers}, torch::ones({}, counts.options()), /*accumulate=*/true);
      trainer_.world().step_done();
    }
    model_->train();
    const auto right = counts.trace().item<double>(), found = counts[1][1].item<double>();
    const auto same = counts[1].sum().item<double>(), answered = counts.select(1, 1).sum().item<double>();
    return {.accuracy = 100 * right / static_cast<double>(dev_.size()), .f1 = same + answered > 0 ? 200 * found / (same + answered) : 0};
  }

  int finish() {
    const auto scores = evaluate();
    trainer_.log({{"accuracy", scores.accuracy}, {"f1", scores.f1}});
    say("accuracy {:.2f} %, F1 {:.2f} % after {} steps", scores.accuracy, scores.f1, trainer_.steps());
    if (!flags_.output.empty()) write_output();
    if (scores.accuracy >= flags_.target) return 0;
    say("that is below the target of {} %", flags_.target);
    return kBelowTarget;
  }

  void write_output() {
    trainer_.save_model(model_, flags_.output);
    if (!trainer_.is_main_process()) return;
    tokenizer_.write(flags_.output);
    config_.write(flags_.output);
    say("wrote the model to {}", flags_.output.string());
  }

  template <class... Args>
  void say(fmt::format_string<Args...> text, Args&&... args) const {
    trainer_.print(fmt::format(text, std::forward<Args>(args)...));
  }

  const Flags flags_;
  Trainer trainer_{{.log_with = flags_.metrics}};
  const double clipping_ = trainer_.settings().is_set("gradient_clipping") ? trainer_.settings().number("gradient_clipping") : 1.0;
  const data::SentencePairs train_, dev_;
  const data::WordPiece tokenizer_;
  const BertConfig config_;
  Model model_;
  data::Loader loader_;
  optim::AdamW optimizer_;
  Course course_{.text = course()};
  train::RunningMean running_loss_{10};
  train::Values shown_;
};

}  // namespace

int main(int argc, char** argv) {
  cli::Program app(
      "Fine-tunes a BERT to tell whether two sentences mean the same (MRPC). Start it on several ranks with: tessera launch "
      "--config-file FILE PATH/TO/glue ...",
      "glue");
  Flags flags;
  declare(app, flags);
  app.add_device_flags();
  return app.run(argc, argv, [&] { return GlueRun(flags).run(); });
}
