// Measures saves and loads of checkpoints: one line of JSON for each operation. bench/checkpoint runs it, and measures the same with
// PyTorch.
#include <ATen/ATen.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <tessera/base/fd.h>
#include <tessera/tessera.h>
#include <torch/torch.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>

#include "bench.h"

namespace {

using namespace tessera;
using bench::seconds_of_slowest;

/// Writes this rank's bytes from memory to disk, as a lower bound: no checkpoint can be faster.
void write_plainly(const std::filesystem::path& path, const at::Tensor& bytes) {
  constexpr int64_t kBlock = 8 << 20;
  const Fd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644));
  TORCH_CHECK(file, "can't create ", path);
  for (int64_t begin = 0; begin < bytes.numel();) {
    const auto count = ::write(file.get(), static_cast<const char*>(bytes.const_data_ptr()) + begin,
                               static_cast<size_t>(std::min(kBlock, bytes.numel() - begin)));
    TORCH_CHECK(count > 0, "can't write ", path);
    begin += count;
  }
  TORCH_CHECK(::fsync(file.get()) == 0, "can't write ", path);
}

/// Seconds of the fastest of three runs. Removes the files and syncs before each run, so that only the first run waits for the machine to
/// provide memory.
double fastest(const Communicator& world, const std::filesystem::path& target, const std::function<void()>& act) {
  double least = std::numeric_limits<double>::infinity();
  for (int i = 0; i < 3; i++) {
    if (world.rank() == 0) std::filesystem::remove_all(target);
    ::sync();
    least = std::min(least, seconds_of_slowest(world, act));
  }
  return least;
}

void run(const std::filesystem::path& folder, int64_t width, int64_t layers) {
  const auto world = init();
  torch::manual_seed(1);
  torch::nn::Sequential model;
  for (int64_t layer = 0; layer < layers; layer++) model->push_back(torch::nn::Linear(width, width));
  for (const auto& layer : *model) fully_shard(layer.ptr(), {.mesh = world});
  fully_shard(model, {.mesh = world});
  optim::AdamW optimizer(model->parameters(), {.lr = 1e-4});
  const auto step = [&] {
    model->forward(torch::randn({4, width})).sum().backward();
    optimizer.step();
    optimizer.zero_grad();
  };
  step();
  checkpoint::Contents contents{.model = model.ptr().get(), .optimizer = &optimizer};
  const int64_t bytes = 12 * layers * (width * width + width);
  const auto report = [&](const std::string& operation, double took) {
    const nlohmann::json row = {{"system", "tessera"}, {"operation", operation}, {"world", world.size()}, {"bytes", bytes}, {"s", took}};
    if (world.rank() == 0) fmt::print("{}\n", row.dump());
  };

  if (folder.string().starts_with("s3:")) {  // bench/s3
    double least = std::numeric_limits<double>::infinity();
    for (int i = 0; i < 3; i++) {
      const auto name = folder / std::to_string(i);
      least = std::min(least, seconds_of_slowest(world, [&] { checkpoint::save(name, contents, world); }));
    }
    report("save native", least);
    return report("load", seconds_of_slowest(world, [&] { checkpoint::load(folder / "0", contents, world); }));
  }
  const auto own = at::ones({bytes / world.size()}, at::kByte), copy = at::zeros_like(own);
  report("memcpy", seconds_of_slowest(world, [&] { std::memcpy(copy.data_ptr(), own.data_ptr(), own.nbytes()); }));
  const auto report_write = [&](const std::string& operation, const at::Tensor& part) {
    std::filesystem::create_directory(folder / "plain");
    report(operation, fastest(world, folder / "plain" / "0", [&] { write_plainly(folder / "plain" / std::to_string(world.rank()), part); }));
  };
  const auto report_save = [&](const std::string& name, const checkpoint::Contents& what, const checkpoint::SaveOptions& options) {
    report("save " + name, fastest(world, folder / name, [&] { checkpoint::save(folder / name, what, world, options); }));
  };
  using checkpoint::AccelerateLayout, checkpoint::Format;
  report_write("write", own);
  report_save("native", contents, {});
  report_save("dcp", contents, {.format = Format::Dcp});
  report_save("accelerate, sharded", contents, {.format = Format::Accelerate});
  report_save("accelerate, full", contents, {.format = Format::Accelerate, .accelerate_layout = AccelerateLayout::Full});
  report_save("whole.pt", contents, {.format = Format::Torch});
  const checkpoint::Contents weights{.model = model.ptr().get()};
  report_write("write weights", own.narrow(0, 0, own.numel() / 3));
  report_save("hub, weights", weights, {.format = Format::Hub, .max_shard_size = 100'000'000});
  report_save("weights.safetensors", weights, {.format = Format::Safetensors});
  report("load", seconds_of_slowest(world, [&] { checkpoint::load(folder / "native", contents, world); }));
  checkpoint::AsyncSaver saver(world);
  saver.save(folder / "first", contents);  // allocates its buffers
  saver.wait();
  double pause = 0;
  report("async save", seconds_of_slowest(world, [&] {
           pause = seconds_of_slowest(world, [&] { saver.save(folder / "async", contents); });
           saver.wait();
         }));
  report("its pause", pause);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Times checkpoints on ranks that tessera launch has started.", "bench_checkpoint_ranks");
  std::filesystem::path folder;
  int64_t width = 2048, layers = 24;
  app.add_option("folder", folder, "An empty folder on the disk to be measured")->required();
  app.add_option("--width", width);
  app.add_option("--layers", layers);
  return bench::run(app, argc, argv, [&] { run(folder, width, layers); });
}
