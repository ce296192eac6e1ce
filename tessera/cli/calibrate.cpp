// Measures a simulate::Machine, for `tessera test --calibrate`.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>

#include "tessera/base/error.h"
#include "tessera/cli/facts.h"
#include "tessera/cli/speed.h"
#include "tessera/comm/communicator.h"
#include "tessera/optim/adam.h"
#include "tessera/simulate/machine.h"

namespace tessera::cli {
namespace {

constexpr int kRounds = 7;
constexpr double kSecondsOfRound = 0.04;
// Bytes of each of the three tensors of a pass. The largest does not fit caches, and is not so large that libc gives its memory back each time.
constexpr int64_t kPassSizes[] = {int64_t{1} << 18, int64_t{1} << 20, int64_t{1} << 22, int64_t{1} << 23, int64_t{24} << 20};
constexpr int64_t kProductSides[] = {1, 16, 64, 256, 1024};
constexpr int64_t kLargeSide = 1024;

/// Measures one thing after the other; all ranks the same at the same time. A speed or time of each rank for each thing.
class Calibration {
 public:
  explicit Calibration(const Communicator& world) : world_(world), options_(world.traits().device) {}

  /// Seconds of a call of `act`, which returns a tensor that depends on all that it does: the median over rounds.
  double seconds_of(const std::function<at::Tensor()>& act) const {
    const auto run = [&](int times) {
      return seconds_that_takes([&] {
        at::Tensor last;
        for (int i = 0; i < times; i++) last = act();
        last.detach().flatten()[0].item();  // waits for a device
      });
    };
    world_.barrier();
    run(1);
    const int times = std::clamp(static_cast<int>(std::ceil(kSecondsOfRound / run(1))), 1, 100'000);
    std::vector<double> found;
    for (int i = 0; i < kRounds; i++) found.push_back(run(times) / times);
    return median_of(std::move(found));
  }

  double product_flops(int64_t side, at::ScalarType dtype) const {
    const auto made = [&](int64_t rows, int64_t columns) { return at::ones({rows, columns}, options_.dtype(dtype)); };
    const auto square = made(kLargeSide, kLargeSide), wide = made(side, kLargeSide), tall = made(kLargeSide, side);
    const auto seconds = seconds_of([&] { return at::mm(wide, square.t()); }) + seconds_of([&] { return at::mm(tall, wide); }) +
                         seconds_of([&] { return at::mm(square, tall); });
    return 6.0 * static_cast<double>(side * kLargeSide * kLargeSide) / seconds;
  }

  double convolution_flops() const {
    constexpr int64_t kImages = 4, kChannels = 64, kSide = 56;
    const auto images = at::ones({kImages, kChannels, kSide, kSide}, options_), kernel = at::ones({kChannels, kChannels, 3, 3}, options_);
    const auto seconds = seconds_of([&] { return at::conv2d(images, kernel, {}, 1, 1); });
    return 2.0 * 9 * kImages * kChannels * kChannels * kSide * kSide / seconds;
  }

  /// Of a pass that reads two tensors of this size and makes a third.
  double pass_bandwidth(int64_t bytes) const {
    const auto a = at::ones({bytes / 4}, options_.dtype(at::kFloat)), b = at::ones_like(a);
    return 3 * static_cast<double>(bytes) / seconds_of([&] { return at::mul(a, b); });
  }

  /// Of an operator on a few values, forward or backward.
  double call() const {
    constexpr int kCalls = 64;
    const auto x = at::ones({8}, options_.dtype(at::kFloat)).requires_grad_(), factor = at::ones({8}, options_.dtype(at::kFloat));
    return seconds_of([&] {
             auto y = x;
             for (int i = 0; i < kCalls; i++) y = y * factor;
             y.sum().backward();
             return x.grad();
           }) /
           (2 * kCalls);
  }

  /// A step of AdamW reads the parameter, its gradient and two moments, and writes all but the gradient.
  double optimizer_bandwidth() const {
    constexpr int64_t kValues = 4 << 20;
    auto parameter = at::ones({kValues}, options_.dtype(at::kFloat)).requires_grad_();
    parameter.mutable_grad() = at::ones({kValues}, options_.dtype(at::kFloat));
    optim::AdamW optimizer(std::vector<at::Tensor>{parameter}, {});
    const auto seconds = seconds_of([&] {
      optimizer.step();
      return parameter;
    });
    return 7 * 4 * static_cast<double>(kValues) / seconds;
  }

  /// Of a link between the ranks of a group that shares a host, all of which gather and reduce at once.
  simulate::MachineLink inner_link(const Communicator& group) const {
    const auto ranks = group.size();
    const auto whole = at::ones({ranks * (int64_t{4} << 20)}, options_.dtype(at::kFloat));
    const auto own = group.own_chunk(whole).clone();
    const Piece piece{.whole = whole, .own = own};
    std::vector<double> waits, moves;
    for (int i = 0; i < 5 * kRounds; i++) waits.push_back(seconds_that_takes([&] { group.barrier(); }));
    for (int i = 0; i < kRounds + 1; i++) {
      group.barrier();
      const auto took = seconds_that_takes([&] {
        group.all_gather({&piece, 1}).wait();
        group.reduce_scatter({&piece, 1}).wait();
        whole[0].item();
      });
      if (i > 0) moves.push_back(took / 2);
    }
    const auto latency = median_of(std::move(waits));
    const auto bytes = 4 * static_cast<double>(whole.numel()) * (ranks - 1) / ranks;
    return {.latency = latency, .bandwidth = bytes / std::max(median_of(std::move(moves)) - 2 * latency, 1e-9)};
  }

 private:
  const Communicator world_;
  const at::TensorOptions options_;
};

/// The median over the pairs of ranks on different hosts; `otherwise` if there are none.
simulate::MachineLink outer_link(const Speeds& speeds, const simulate::MachineLink& otherwise) {
  std::vector<double> latencies, bandwidths;
  for (const auto& pair : speeds.pairs) {
    if (speeds.topology.host_of(pair.first) == speeds.topology.host_of(pair.second)) continue;
    latencies.push_back(pair.latency);
    bandwidths.push_back(pair.bandwidth);
  }
  if (latencies.empty()) return otherwise;
  return {.latency = median_of(std::move(latencies)), .bandwidth = median_of(std::move(bandwidths))};
}

/// The ranks of this rank's host.
Communicator ranks_of_host(const Communicator& world) {
  std::vector<int> colors;
  for (int rank = 0; rank < world.size(); rank++) colors.push_back(world.topology().host_of(rank));
  return world.split(colors);
}

/// A number of each thing, measured on this rank.
std::vector<double> measured(const Communicator& world) {
  const Calibration calibration(world);
  std::vector<double> values;
  for (const auto side : kProductSides) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) values.push_back(calibration.product_flops(side, dtype));
  }
  values.push_back(calibration.convolution_flops());
  for (const auto size : kPassSizes) values.push_back(calibration.pass_bandwidth(size));
  values.push_back(calibration.optimizer_bandwidth());
  values.push_back(calibration.call());
  const auto host = ranks_of_host(world);
  const auto link = host.size() > 1 ? calibration.inner_link(host) : simulate::MachineLink();
  values.insert(values.end(), {link.latency, link.bandwidth, static_cast<double>(usable_memory().value_or(0)),
                               static_cast<double>(host.size())});
  return values;
}

/// Rows of numbers, one for each rank, on every rank.
std::vector<std::vector<double>> on_all_ranks(const Communicator& world, const std::vector<double>& own) {
  auto all = at::zeros({world.size(), std::ssize(own)}, at::kDouble);
  std::ranges::copy(own, all[world.rank()].data_ptr<double>());
  all = all.to(world.traits().device);
  world.all_reduce(all).wait();
  all = all.to(at::kCPU);
  std::vector<std::vector<double>> rows;
  for (int rank = 0; rank < world.size(); rank++) {
    const auto* row = all[rank].data_ptr<double>();
    rows.emplace_back(row, row + own.size());
  }
  return rows;
}

}  // namespace

void calibrate(const Communicator& world, const std::string& file) {
  if (world.traits().traces || world.traits().simulated)
    throw ConfigError("--calibrate measures ranks on CPUs and GPUs, and the transport {} has none", world.traits().name);
  const auto rows = on_all_ranks(world, measured(world));
  const auto speeds = measured_speeds(world);
  if (!world.is_first()) return;
  const bool on_cpu = world.traits().device.is_cpu();
  auto machine = on_cpu ? simulate::Machine::cpu() : simulate::Machine::gpu();
  std::vector<SpeedRow> table;
  size_t at = 0;
  const auto next = [&] {
    std::vector<double> of_ranks;
    for (const auto& row : rows) of_ranks.push_back(row[at]);
    at++;
    return of_ranks;
  };
  const auto shown = [&](const std::string& name, Better better, std::string (*text)(double)) {
    const auto values = next();
    table.push_back(speed_row(name, values, better, text, [&](size_t i) { return fmt::format("rank {} ({})", i, speeds.hosts[i]); }));
    return median_of(values);
  };
  machine.products.clear();
  for (const auto side : kProductSides) {
    auto& one = machine.products.emplace_back(simulate::ProductSpeed{.side = static_cast<double>(side)});
    one.float32 = shown(fmt::format("product, side {}, float32", side), Better::More, computing_text);
    one.bfloat16 = shown(fmt::format("product, side {}, bfloat16", side), Better::More, computing_text);
  }
  machine.convolution_flops = shown("convolution, float32", Better::More, computing_text);
  std::vector<double> passes;
  for (const auto size : kPassSizes) passes.push_back(shown(fmt::format("pass over {} kB", 3 * size / 1024), Better::More, bandwidth_text));
  machine.cached_bandwidth = *std::ranges::max_element(passes);
  machine.bandwidth = passes.back();
  machine.cache = 0;
  for (size_t i = 0; i < passes.size(); i++) {
    if (passes[i] > std::sqrt(machine.cached_bandwidth * machine.bandwidth)) machine.cache = 3 * static_cast<double>(kPassSizes[i]);
  }
  machine.optimizer_bandwidth = shown("step of AdamW", Better::More, bandwidth_text);
  machine.call = shown("operator on 8 values", Better::Less, latency_text);
  if (rows.front().back() > 1) {
    machine.inner.latency = shown("within a host, latency", Better::Less, latency_text);
    machine.inner.bandwidth = shown("within a host, bandwidth", Better::More, bandwidth_text);
  } else {
    at += 2;
  }
  machine.memory = median_of(next());
  if (!on_cpu) machine.memory = 0;  // that of GPUs is not asked for
  machine.ranks_per_host = static_cast<int>(median_of(next()));
  machine.outer = outer_link(speeds, machine.outer);
  machine.write(file);
  fmt::print("{}  wrote {}: the medians{}\n", speed_table(std::move(table)), file,
             speeds.topology.hosts() > 1 ? "" : "; the network between hosts is the built-in one, because there is one host");
}

}  // namespace tessera::cli
