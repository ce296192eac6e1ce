// `tessera llm eval`.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <list>
#include <memory>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/cli/flags.h"
#include "tessera/cli/models/llm.h"
#include "tessera/llm/packing.h"
#include "tessera/llm/token_file.h"
#include "tessera/llm/tokenize.h"
#include "tessera/train/progress.h"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;

/// A part of a document that is read at once, and the first of its tokens whose probability counts.
struct Window {
  std::span<const int32_t> tokens;
  int64_t first;
};

/// Divides a document so that each token counts once, in the window in which most tokens come before it.
void add_windows(std::vector<Window>& windows, std::span<const int32_t> document, int64_t length, int64_t stride) {
  const auto size = std::ssize(document);
  for (int64_t begin = 0, counted = 0; counted < size; begin += stride) {
    const auto end = std::min(begin + length, size);
    const Window window{document.subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin)), std::max<int64_t>(counted - begin, 1)};
    if (std::ranges::any_of(window.tokens.subspan(std::min<size_t>(window.first, window.tokens.size())), [](int32_t t) { return !llm::is_only_read(t); }))
      windows.push_back(window);
    counted = end;
  }
}

/// Windows that are read together. Shorter ones are filled up at their end, which changes nothing of what comes before.
struct WindowBatch {
  at::Tensor tokens;   // {windows, length}
  at::Tensor places;   // where states are whose scores count
  at::Tensor targets;  // the token after each of these places

  explicit WindowBatch(std::span<const Window> windows) {
    const auto length = std::ssize(std::ranges::max(windows, {}, [](const Window& each) { return each.tokens.size(); }).tokens);
    tokens = at::zeros({std::ssize(windows), length}, at::kLong);
    std::vector<int64_t> where, next;
    for (int64_t row = 0; row < std::ssize(windows); row++) {
      const auto& [own, first] = windows[static_cast<size_t>(row)];
      auto* const to = tokens.mutable_data_ptr<int64_t>() + row * length;
      std::ranges::transform(own, to, llm::token_of);
      for (auto i = first; i < std::ssize(own); i++) {
        if (llm::is_only_read(own[static_cast<size_t>(i)])) continue;
        where.push_back(row * length + i - 1);
        next.push_back(to[i]);
      }
    }
    places = at::tensor(where, at::kLong);
    targets = at::tensor(next, at::kLong);
  }
};

struct EvalCommand {
  ModelFlags model;
  std::vector<fs::path> files;
  std::string chat, end;
  int64_t length = 0, stride = 0, rows = 4;

  int run() const {
    LanguageModel used(model);
    const auto longest = used.config.max_position_embeddings;
    const auto window = length > 0 ? length : std::min<int64_t>(1024, longest), step = stride > 0 ? stride : std::max<int64_t>(window / 2, 1);
    if (window > longest) throw ConfigError("--length {}: the model takes at most {} tokens", window, longest);
    if (step >= window)
      throw ConfigError("--stride {}: the first of the {} tokens of a window counts in the window before it; give at most {}", step, window, window - 1);
    llm::TokenizeOptions options{.end = end_token(end, used.tokenizer, model.model)};
    if (const auto found = chat_template(chat, model.model)) options.chat = std::make_shared<llm::ChatTemplate>(*found);
    std::list<std::vector<int32_t>> documents;
    std::vector<Window> windows;
    for (const auto& file : files) {
      int32_t largest = -1;
      llm::each_document(file, used.tokenizer, options, [&](std::span<const int32_t> document) {
        for (const auto token : document) largest = std::max(largest, llm::token_of(token));
        add_windows(windows, documents.emplace_back(document.begin(), document.end()), window, step);
        return true;
      });
      llm::expect_vocabulary(file, largest + 1, used.config.vocab_size);
    }
    if (windows.empty()) throw ConfigError("no token of these files has another one before it, so nothing can be measured; give longer texts");
    std::ranges::stable_sort(windows, std::greater(), [](const Window& each) { return each.tokens.size(); });  // few are filled up
    report(used, windows, window, step);
    return 0;
  }

  void report(LanguageModel& used, std::span<const Window> windows, int64_t window, int64_t step) const {
    const at::NoGradGuard no_grad;
    const auto& world = used.world;
    const auto ranks = world.traits().can_differ() ? world.size() : 1, rank = ranks > 1 ? world.rank() : 0;
    std::vector<WindowBatch> batches;
    int64_t read = 0;
    for (size_t i = 0; i < windows.size(); i += static_cast<size_t>(rows))
      batches.emplace_back(windows.subspan(i, std::min(static_cast<size_t>(rows), windows.size() - i)));
    for (const auto& each : windows) read += std::ssize(each.tokens);
    auto sums = at::zeros({3}, at::kDouble);  // of losses, of their squares, and of ones
    const auto begin = std::chrono::steady_clock::now();
    const auto rounds = (std::ssize(batches) + ranks - 1) / ranks;
    train::Progress progress({.title = "windows", .steps = rounds, .at_end = train::AtEnd::Vanishes, .rank = world.is_first() ? 0 : 1},
                             train::Display::of(stderr));
    for (int64_t round = 0; round < rounds; round++) {
      // All ranks make the same passes; one that has no batch left repeats the first, which doesn't count.
      const auto number = round * ranks + rank;
      const auto& batch = batches[static_cast<size_t>(number < std::ssize(batches) ? number : 0)];
      const auto device = world.traits().device;
      const auto states = call(used.model->model, batch.tokens.to(device)).flatten(0, 1).index_select(0, batch.places.to(device));
      const auto losses = used.model->losses_of(states, batch.targets.to(device)).cpu().to(at::kDouble);
      if (number < std::ssize(batches)) sums += at::stack({losses.sum(), losses.square().sum(), at::scalar_tensor(losses.numel(), at::kDouble)});
      progress.update(round + 1);
    }
    if (ranks > 1) {
      const auto all = sums.to(world.traits().device);
      world.all_reduce(all, {}, {.unit = "the result"}).wait();
      sums = all.cpu();
    }
    progress.finish();
    const auto seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    const auto count = sums[2].item<double>(), mean = sums[0].item<double>() / count;
    const auto variance = std::max(0.0, sums[1].item<double>() / count - mean * mean);
    const auto perplexity = std::exp(mean), error = count > 1 ? perplexity * std::sqrt(variance / (count - 1)) : 0;
    if (!world.is_first()) return;
    fmt::print("perplexity {:.4f} +- {:.4f}, loss {:.4f}, over {} in windows of {} with stride {}\n", perplexity, error, mean,
               counted(static_cast<int64_t>(count), "token"), window, step);
    expect_printed();
    used.note(fmt::format("{}, {:.1f} a second", counted(read, "token"), static_cast<double>(read) / seconds));
  }
};

}  // namespace

void add_llm_eval(CLI::App& command, std::function<int()>& chosen) {
  auto* flags = command.add_subcommand("eval", "Measures the perplexity of texts");
  const auto eval = std::make_shared<EvalCommand>();
  add_model_flags(*flags, eval->model);
  flags->add_option("FILE", eval->files, "Texts (.txt, .md), lines of JSON, or files of tokens, made by `tessera data tokenize`")->required();
  add_chat_flag(*flags, eval->chat);
  add_end_flag(*flags, eval->end);
  flags->add_option("--length", eval->length, "Tokens that are read at once; 1024, or as many as the model takes, unless given")
      ->check(from_to(2, 100'000'000));
  flags->add_option("--stride", eval->stride, "How many tokens later the next window begins; half a window unless given")
      ->check(from_to(1, 100'000'000));
  flags->add_option("--batch-size", eval->rows, "Windows that are read together")->capture_default_str()->check(from_to(1, 1'000'000));
  flags->footer(Help::footer_of({"tessera llm eval SmolLM2-135M wiki.txt", "tessera llm eval my.gguf a.tokens --length 512 --stride 128"},
                                "The perplexity is exp of the mean of -log p over all tokens that have one before them in their document. Each counts "
                                "once, with at least length - stride tokens before it, if there are so many. Texts become tokens as by tessera data "
                                "tokenize, and only those that are learned count. The number after +- is the standard error."));
  flags->callback([&chosen, eval] { chosen = [=] { return eval->run(); }; });
}

}  // namespace tessera::cli
