// Measures a simulate::Machine, for `tessera test --calibrate`.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <fstream>

#include "tessera/base/error.h"
#include "tessera/base/middle.h"
#include "tessera/base/words.h"
#include "tessera/cli/facts.h"
#include "tessera/cli/speed.h"
#include "tessera/comm/communicator.h"
#include "tessera/simulate/machine.h"

namespace tessera::cli {
namespace {

using simulate::Machine;

constexpr int kRounds = 5;
constexpr double kSecondsOfRound = 0.03;
constexpr int64_t kLargeSide = 1024;
// Bytes of each of the three tensors of the largest pass.
constexpr int64_t kLeastPass = int64_t{24} << 20, kMostPass = int64_t{256} << 20;

/// A thing that every rank measures, while the others do so, too.
struct Measurement {
  std::string name;
  std::function<double()> measure;
  double* member;  // of the machine, for the median over the ranks
  std::string (*text)(double) = computing_text;
};

/// The seconds of a call of `act`, which returns a tensor that depends on all that it does: the median over rounds.
double seconds_of_call(const std::function<at::Tensor()>& act) {
  const auto run = [&](int times) {
    return seconds_that_takes([&] {
      at::Tensor last;
      for (int i = 0; i < times; i++) last = act();
      last.detach().flatten()[0].item();  // waits for a device
    });
  };
  run(1);
  const int times = std::clamp(static_cast<int>(std::ceil(kSecondsOfRound / run(1))), 1, 100'000);
  std::vector<double> found;
  for (int i = 0; i < kRounds; i++) found.push_back(run(times) / times);
  return middle_of(std::move(found)).second;
}

/// Of products in which each of the three sides is the smallest.
double narrow_product_speed(int64_t side, const at::TensorOptions& options) {
  const auto square = at::ones({kLargeSide, kLargeSide}, options), wide = at::ones({side, kLargeSide}, options);
  const auto tall = wide.t().contiguous();
  const auto seconds = seconds_of_call([&] { return at::mm(wide, square.t()); }) + seconds_of_call([&] { return at::mm(tall, wide); }) +
                       seconds_of_call([&] { return at::mm(square, tall); });
  return 6.0 * static_cast<double>(side * kLargeSide * kLargeSide) / seconds;
}

double convolution_speed(const at::TensorOptions& options) {
  constexpr int64_t kImages = 4, kChannels = 64, kSide = 56;
  const auto images = at::ones({kImages, kChannels, kSide, kSide}, options), kernel = at::ones({kChannels, kChannels, 3, 3}, options);
  const auto seconds = seconds_of_call([&] { return at::conv2d(images, kernel, {}, 1, 1); });
  return 2.0 * 9 * kImages * kChannels * kChannels * kSide * kSide / seconds;
}

/// Bytes of each tensor of passes. The largest pass does not fit the last cache, of which each rank of the host has a part.
std::vector<int64_t> pass_sizes(bool on_cpu, int ranks) {
  constexpr int64_t kUsualCache = 32 << 10;
  int64_t cache = 0;  // in kB
  std::ifstream("/sys/devices/system/cpu/cpu0/cache/index3/size") >> cache;  // "32768K"
  if (cache <= 0) cache = kUsualCache;
  const auto largest = on_cpu ? std::clamp(4 * cache * 1024 / ranks, kLeastPass, kMostPass) : kMostPass;
  return {int64_t{1} << 18, int64_t{1} << 20, int64_t{1} << 22, int64_t{1} << 23, largest};
}

/// Of a pass that reads two tensors of this size and writes a third, which is there already: libc would map a large one anew each time.
double pass_speed(int64_t bytes, const at::TensorOptions& options) {
  const auto a = at::ones({bytes / 4}, options), b = at::ones_like(a);
  auto product = at::ones_like(a);
  return 3 * static_cast<double>(bytes) / seconds_of_call([&] { return at::mul_out(product, a, b); });
}

/// A step of AdamW reads the parameter, its gradient and two moments, and writes all but the gradient.
double optimizer_speed(const at::TensorOptions& options) {
  constexpr int64_t kValues = 4 << 20;
  const auto made = [&] { return at::ones({kValues}, options); };
  const auto parameter = made(), gradient = made(), mean = made(), square = made(), step = at::ones({}, options);
  const auto seconds = seconds_of_call([&] {
    at::_fused_adamw_({parameter}, {gradient}, {mean}, {square}, {}, {step}, 1e-3, 0.9, 0.999, 1e-2, 1e-8, /*amsgrad=*/false,
                      /*maximize=*/false);
    return parameter;
  });
  return 7 * 4 * static_cast<double>(kValues) / seconds;
}

/// Of an operator on a few values, forward or backward.
double seconds_of_operator(const at::TensorOptions& options) {
  constexpr int kCalls = 64;
  const auto x = at::ones({8}, options).requires_grad_(), factor = at::ones({8}, options);
  const auto seconds = seconds_of_call([&] {
    auto y = x;
    for (int i = 0; i < kCalls; i++) y = y * factor;
    y.sum().backward();
    return x.grad();
  });
  return seconds / (2 * kCalls);
}

double latency_within(const Communicator& host) {
  std::vector<double> waits(10 * kRounds);
  for (auto& wait : waits) wait = seconds_that_takes([&] { host.barrier(); });
  return middle_of(std::move(waits)).second;
}

/// Of a rank in a gather and a reduction by all ranks of a host, each of which does so equally often.
double bandwidth_within(const Communicator& host, const at::TensorOptions& options) {
  const auto whole = at::ones({host.size() * (int64_t{4} << 20)}, options);
  const Piece piece{.whole = whole, .own = host.own_chunk(whole).clone()};
  const auto seconds = [&] {
    return seconds_that_takes([&] {
      host.all_gather({&piece, 1}).wait();
      host.reduce_scatter({&piece, 1}).wait();
      piece.own.flatten()[0].item();  // waits for a device
    });
  };
  seconds();
  std::vector<double> found(2 * kRounds);
  for (auto& one : found) one = seconds();
  return 2 * 4 * static_cast<double>(whole.numel() - piece.own.numel()) / middle_of(std::move(found)).second;
}

}  // namespace

void calibrate(const Communicator& world, const std::string& file) {
  if (world.traits().traces || world.traits().simulated)
    throw ConfigError("--calibrate measures ranks on CPUs and GPUs, and the transport {} has none", world.traits().name);
  std::vector<int> colors;
  for (int rank = 0; rank < world.size(); rank++) colors.push_back(world.topology().host_of(rank));
  const auto host = world.split(colors);
  const auto plain = at::TensorOptions(world.traits().device).dtype(at::kFloat);
  const bool on_cpu = world.traits().device.is_cpu();
  auto machine = Machine::named(on_cpu ? "cpu" : "gpu");
  machine.ranks_per_host = host.size();

  std::vector<Measurement> all;
  for (size_t i = 0; i < simulate::kProductSides.size(); i++) {
    const auto side = simulate::kProductSides[i];
    auto& one = machine.products[i];
    all.push_back({fmt::format("product, side {}, float32", side), [=] { return narrow_product_speed(side, plain); }, &one.float32});
    const auto half = plain.dtype(at::kBFloat16);
    all.push_back({fmt::format("product, side {}, bfloat16", side), [=] { return narrow_product_speed(side, half); }, &one.bfloat16});
  }
  all.push_back({"convolution", [=] { return convolution_speed(plain); }, &machine.convolution_flops});
  const auto sizes = pass_sizes(on_cpu, host.size());
  std::vector<double> passes(sizes.size());
  for (size_t i = 0; i < passes.size(); i++) {
    const auto size = sizes[i];
    all.push_back({fmt::format("pass over {} kB", 3 * size / 1024), [=] { return pass_speed(size, plain); }, &passes[i], bandwidth_text});
  }
  all.push_back({"step of AdamW", [=] { return optimizer_speed(plain); }, &machine.optimizer_bandwidth, bandwidth_text});
  all.push_back({"operator on 8 values", [=] { return seconds_of_operator(plain); }, &machine.call, duration_text});
  if (host.size() > 1) {
    all.push_back({"latency within a host", [=] { return latency_within(host); }, &machine.inner.latency, duration_text});
    all.push_back({"bandwidth within a host", [=] { return bandwidth_within(host, plain); }, &machine.inner.bandwidth, bandwidth_text});
  }

  auto values = at::zeros({std::ssize(all), world.size()}, at::kDouble);
  for (size_t i = 0; i < all.size(); i++) {
    world.barrier();
    values[static_cast<int64_t>(i)][world.rank()] = all[i].measure();
  }
  values = values.to(world.traits().device);
  world.all_reduce(values).wait();
  values = values.cpu();
  const auto speeds = measured_speeds(world);
  if (!world.is_first()) return;

  std::vector<SpeedRow> table;
  for (size_t i = 0; i < all.size(); i++) {
    const auto* begin = values[static_cast<int64_t>(i)].data_ptr<double>();
    const std::vector<double> of_ranks(begin, begin + world.size());
    const auto [less, more] = middle_of(of_ranks);
    *all[i].member = all[i].text == duration_text ? more : less;  // of two in the middle the slower one, as ranks wait for each other
    table.push_back(speed_row(all[i].name, of_ranks, all[i].text,
                              [&](size_t rank) { return fmt::format("rank {} ({})", rank, speeds.hosts[rank]); }));
  }
  std::string remark;
  for (size_t i = 2; on_cpu && i < passes.size(); i++) {  // threads make the smallest pass slow
    if (passes[i] > 2 * passes[i - 1])
      remark = fmt::format("\n  the pass over {} kB was faster than a smaller one: other programs have disturbed this, so measure again",
                           3 * sizes[i] / 1024);
  }
  machine.cached_bandwidth = std::ranges::max(passes);
  machine.bandwidth = passes.back();
  machine.cache = 0;
  for (size_t i = 0; i < passes.size(); i++) {
    if (passes[i] > std::sqrt(machine.cached_bandwidth * machine.bandwidth)) machine.cache = 3 * static_cast<double>(sizes[i]);
  }
  machine.memory = on_cpu ? static_cast<double>(usable_memory().value_or(0)) : 0;  // that of GPUs is not known here
  std::vector<double> latencies, bandwidths;
  for (const auto& pair : speeds.pairs) {
    if (speeds.topology.host_of(pair.first) == speeds.topology.host_of(pair.second)) continue;
    latencies.push_back(pair.latency);
    bandwidths.push_back(pair.bandwidth);
  }
  if (!latencies.empty()) machine.outer = {.latency = middle_of(latencies).second, .bandwidth = middle_of(bandwidths).second};
  machine.write(file);
  const auto* const built_in = speeds.topology.hosts() > 1 ? ""
                               : host.size() > 1 ? "; there is one host, so the network between hosts is the built-in one"
                                                 : "; there is one rank, so the links between ranks and hosts are the built-in ones";
  fmt::print("{}  wrote the medians{} to {}{}{}\n", speed_table(std::move(table)),
             world.size() % 2 == 0 ? " (of two values in the middle the slower one)" : "", file, built_in, remark);
}

}  // namespace tessera::cli
