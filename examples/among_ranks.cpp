// One rank writes a file for all, each answers a part of it, and all gather the answers: tessera launch -n 3 among_ranks
// Also writes a trace with the time that each part took.
#include <tessera/models/mlp.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <filesystem>
#include <string>

using namespace tessera;

int main() {
  const Trainer trainer;
  torch::Tensor rows;
  trainer.main_process_first([&] {
    if (!std::filesystem::exists("rows.pt")) {  // only rank 0 comes here
      torch::save(torch::randn({101, 32}), "rows.pt");
    }
    torch::load(rows, "rows.pt");
  });
  const auto own = trainer.split_between_processes(rows);

  trainer.set_seed(1);  // the same weights on every rank
  models::Mlp model(models::MlpOptions{.width = 32, .layers = 3, .classes = 4});
  fully_shard(model, {.mesh = trainer.world()});
  const torch::NoGradGuard no_grad;
  torch::Tensor answers;
  {
    const auto profile = trainer.profile({.output_trace_dir = "trace"});
    answers = model(own).argmax(1);
  }
  const auto all = trainer.gather_for_metrics(answers, {});  // parts need not be equally long
  trainer.print(std::to_string(all.size(0)) + " answers");
}
