// Trains a language model like Llama, from a Hugging Face folder, a GGUF file or nothing. How it is sharded comes from the configuration.
#include "llama_losses.h"
#include "llama_result.h"

namespace {

int train_model(const Flags& flags) {
  Model model = nullptr;
  Trainer trainer({.settings = settings_of(flags),
                   .defaults = defaults_of(flags),
                   .adjust_sharding = [&](ShardOptions& options) { prepare_units(flags, trainer, model, options); },
                   .log_with = flags.metrics});
  const Source source(flags);
  auto rows = rows_of(flags.data, flags, source);
  auto eval_rows = flags.eval_data.empty() ? std::nullopt : std::optional(rows_of(flags.eval_data, flags, source));
  if (!flags.gguf.empty()) llm::expect_gguf_place(source.config, source.tokenizer, source.path);
  trainer.set_seed(flags.seed);
  model = make_model(flags, source);
  trainer.prepare(model);
  expect_use(flags, source.config, model);
  trainer.main_process_first([&] {
    if (trainer.is_main_process()) expect_places(flags);
  });
  if (flags.output.empty() && flags.adapter.empty() && flags.run.prefix.empty() && trainer.is_main_process())
    log(LogLevel::Warning, "nothing of this run is kept; to keep it, give --output, --adapter or --ckpt-prefix");
  if (!flags.model.empty()) load(model, flags, trainer);
  data::Loader loader(
      trainer.make_sampler(
          {.size = rows.size, .global_batch = flags.batch_size * trainer.num_processes(), .tail = data::Tail::Fill, .seed = flags.seed}),
      rows.fetch, {.workers = flags.workers, .target_of_repeats = llm::kIgnored, .data = rows.data});
  const auto all = *flags.run.epochs * trainer.steps_of_epoch(loader), steps = std::min(all, flags.run.steps.value_or(all));
  const optim::LearningRate rate{.base = flags.lr,
                                 .shape = optim::LearningRate::Shape::Cosine,
                                 .warmup = static_cast<int64_t>(flags.warmup * static_cast<double>(steps)),
                                 .steps = std::max<int64_t>(steps, 1)};
  const auto made = make_optimizer(flags, model);
  auto& optimizer = *made;
  trainer.prepare(optimizer, loader, rate);

  const Losses losses(model, flags, trainer);
  losses.refer(rows);
  if (eval_rows) losses.refer(*eval_rows);
  const auto passes = trainer.settings().integer("gradient_accumulation_steps");
  auto learned = torch::zeros({}, trainer.world().traits().device);  // what is learned in this step so far, the mean over the ranks
  train::Run run(trainer, loader, flags.run);
  torch::Tensor loss;    // of the last pass of this rank
  bool is_kept = false;  // whether the present adapters are saved
  while (run.next_epoch()) {
    for (const auto& samples : run.batches()) {
      const auto accumulation = trainer.accumulate();
      auto pass = losses.pass(rows, samples);
      trainer.backward(pass.share);
      learned += pass.counted;
      if (trainer.sync_gradients()) {
        if (passes > 1) optimizer.scale_gradients(pass.divisor * passes / learned.clamp_min(kLeast));
        learned.zero_();
      }
      loss = pass.share.detach() * pass.divisor / pass.own.clamp_min(kLeast);
      const auto norm = flags.clip > 0 ? trainer.clip_grad_norm(flags.clip) : trainer.grad_norm();
      trainer.step();
      pass.measured.insert(pass.measured.begin(), {{"loss", loss, pass.own}, {"grad_norm", norm}});
      run.report(pass.measured);
      if (!eval_rows || !run.should_evaluate()) continue;
      const auto values = losses.evaluate(*eval_rows);
      const bool is_best = run.evaluated(values);
      const auto when = loader.at_end() || trainer.steps() == flags.run.steps ? fmt::format("epoch {}", run.epoch()) : fmt::format("step {}", trainer.steps());
      const auto value = values.front().value;
      run.say(flags.preference.empty() ? fmt::format("{}: loss {:.4f}, perplexity {:.2f}", when, value, std::exp(value))
                                       : fmt::format("{}: loss {:.4f}", when, value));
      if (is_best && flags.keep_best && !flags.adapter.empty()) save_adapter(model, flags, trainer);
    }
    if (run.stopped()) return 0;
    if (flags.adapter.empty() || flags.keep_best) continue;
    save_adapter(model, flags, trainer);
    is_kept = true;
  }
  if (run.stopped()) return 0;
  if (loss.defined() && !std::isfinite(loss.item<double>()))
    log(LogLevel::Warning, "the last loss is not finite, so the weights are of no use; a lower --lr, a longer --warmup or --clip may help");
  if (const auto best = run.best_checkpoint(); best && flags.keep_best) {
    run.say(fmt::format("the best evaluation is that of {}", best->string()));
    trainer.load_state(*best);
  }
  if (!flags.adapter.empty()) {
    if (!is_kept) save_adapter(model, flags, trainer);  // not saved yet if the run has resumed at its end
    run.say(fmt::format("wrote the adapters to {}", flags.adapter.string()));
  }
  if (!flags.output.empty()) write(model, flags, source, trainer, run);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  cli::Program app("Trains a language model like Llama. How it is sharded comes from the configuration.", "llama",
                   {"tessera data tokenize notes.txt --tokenizer SmolLM2 --out notes.tokens",
                    "tessera launch -n 2 llama --model SmolLM2 --data notes.tokens --output tuned",
                    "llama --model SmolLM2 --data notes.tokens --method qlora --adapter adapter"});
  Flags flags;
  declare(app, flags);
  app.add_device_flags();
  return app.run(argc, argv, [&] { return train_model(flags); });
}
