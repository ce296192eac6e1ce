// How fast checkpoints are saved and loaded: one line of JSON for each operation. bench/checkpoint runs it beside PyTorch's.
#include <ATen/ATen.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <tessera/base/fd.h>
#include <tessera/tessera.h>
#include <torch/torch.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>

namespace {

using namespace tessera;
using Clock = std::chrono::steady_clock;

/// Seconds that the slowest rank takes.
double seconds(const Communicator& world, const std::function<void()>& act) {
  world.barrier();
  const auto begin = Clock::now();
  act();
  const auto own = at::full({1}, std::chrono::duration<double>(Clock::now() - begin).count(), at::kDouble);
  world.all_reduce(own, {.op = Reduce::Max}).wait();
  return own.item<double>();
}

/// What no checkpoint can be faster than: the bytes of this rank, from memory to disk.
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

int run(const std::filesystem::path& folder, int64_t width, int64_t layers) {
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

  const auto own = at::ones({bytes / world.size()}, at::kByte), copy = at::zeros_like(own);
  report("memcpy", seconds(world, [&] { std::memcpy(copy.data_ptr(), own.data_ptr(), own.nbytes()); }));
  const auto write = [&](const at::Tensor& part) { write_plainly(folder / fmt::format("plain-{}", world.rank()), part); };
  report("write", seconds(world, [&] { write(own); }));
  report("save", seconds(world, [&] { checkpoint::save(folder / "blocking", contents, world); }));
  using checkpoint::Format;
  struct Saved {
    const char* name;
    checkpoint::SaveOptions options;
    bool weights_only = false;
  };
  const Saved others[] = {
      {"dcp", {.format = Format::Dcp}},
      {"accelerate", {.format = Format::Accelerate}},
      {"full", {.format = Format::Accelerate, .accelerate_layout = checkpoint::AccelerateLayout::Full}},
      {"whole.pt", {.format = Format::Torch}},
      {"hub", {.format = Format::Hub, .max_shard_size = 100'000'000}, true},
      {"model.safetensors", {.format = Format::Safetensors}, true},
  };
  for (const auto& [name, options, weights_only] : others) {  // each after a plain write of as much
    const auto part = weights_only ? own.narrow(0, 0, own.numel() / 3) : own;
    const auto plain = seconds(world, [&] { write(part); });
    const auto took = seconds(world, [&] {
      checkpoint::save(folder / name, weights_only ? checkpoint::Contents{.model = model.ptr().get()} : contents, world, options);
    });
    report(fmt::format("{} / write", name), took / plain);
    report(fmt::format("save {}", name), took);
    world.barrier();
    if (world.rank() == 0) std::filesystem::remove_all(folder / name);
  }
  report("load", seconds(world, [&] { checkpoint::load(folder / "blocking", contents, world); }));
  checkpoint::AsyncSaver saver(world);
  saver.save(folder / "first", contents);  // takes its buffers
  saver.wait();
  double pause = 0;
  report("async save", seconds(world, [&] {
           pause = seconds(world, [&] { saver.save(folder / "async", contents); });
           saver.wait();
         }));
  report("its pause", pause);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Times checkpoints on ranks that tessera launch has started.", "bench_checkpoint_ranks");
  std::filesystem::path folder;
  int64_t width = 2048, layers = 24;
  app.add_option("folder", folder, "An empty folder on the disk to be measured")->required();
  app.add_option("--width", width);
  app.add_option("--layers", layers);
  CLI11_PARSE(app, argc, argv);
  try {
    return run(folder, width, layers);
  } catch (const std::exception& error) {
    fmt::print(stderr, "bench_checkpoint_ranks: {}\n", error.what());
    return 1;
  }
}
