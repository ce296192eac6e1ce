// Measures how fast ranks move and add bytes: one line of JSON for each operation and size. bench/collectives runs it over each transport.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <tessera/shard/memory/gradient_slots.h>
#include <tessera/tessera.h>

#include <CLI/CLI.hpp>
#include <cstring>
#include <nlohmann/json.hpp>

#include "bench.h"

namespace {

using namespace tessera;
/// Seconds that the slowest rank takes for `act`: the median of several rounds.
double seconds(const Communicator& world, const std::function<void()>& act) {
  constexpr int kRounds = 9;
  std::vector<double> times;
  for (int round = 0; round < kRounds + 2; round++) {
    const auto took = bench::seconds_of_slowest(world, act);
    if (round >= 2) times.push_back(took);
  }
  return bench::median(times);
}

void report(const Communicator& world, const std::string& system, const std::string& operation, int64_t bytes, double took) {
  // The least memory traffic: a copy reads and writes each byte, a sum reads the values of all ranks and writes this rank's part.
  const auto ranks = static_cast<double>(world.size()), size = static_cast<double>(bytes);
  const double moved = operation == "reduce_scatter" ? size + size / ranks : 2 * size;
  if (world.rank() != 0) return;
  const nlohmann::json row = {{"system", system}, {"operation", operation}, {"world", world.size()},
                              {"bytes", bytes},   {"ms", 1e3 * took},       {"gb_per_s", ranks * moved / took / 1e9}};
  fmt::print("{}\n", row.dump());
}

void run() {
  const auto world = init();
  const auto name = "tessera " + world.traits().name;
  for (const int64_t megabytes : {1, 16, 64}) {
    const int64_t bytes = megabytes << 20;
    const auto numel = bytes / 4 / world.size() * world.size();
    const auto whole = at::ones({numel}), other = at::zeros({numel});
    const auto own = at::ones({numel / world.size()});
    report(world, "memcpy", "copy", bytes, seconds(world, [&] { std::memcpy(other.data_ptr(), whole.data_ptr(), whole.nbytes()); }));
    const Piece piece{.whole = whole, .own = own};
    report(world, name, "all_gather", bytes, seconds(world, [&] { world.all_gather(std::span(&piece, 1)).wait(); }));
    report(world, name, "reduce_scatter", bytes, seconds(world, [&] { world.reduce_scatter(std::span(&piece, 1)).wait(); }));
    report(world, name, "all_reduce", bytes, seconds(world, [&] { world.all_reduce(other).wait(); }));
    if (world.traits().name != "shm") continue;
    // Gradients in shared memory: the caller has packed them, so only the sum is measured.
    const auto slots = GradientSlots::of(world);
    const auto turn = GradientSlots::make_turn();
    const GradientPlan plan{.numel = numel, .dtype = at::kFloat, .device = at::kCPU};
    report(world, "tessera slots", "reduce_scatter", bytes, seconds(world, [&] {
             const auto packing = slots->buffers(std::span(&plan, 1), world.limit());
             const Piece packed{.whole = packing.buffers.front(), .own = own};
             slots->reduce(turn, std::span(&packed, 1), {.unit = "bench"}, world.limit()).wait();
           }));
  }
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Times collectives over the transport that TESSERA_TRANSPORT names, on ranks that tessera launch has started.",
               "bench_collectives_ranks");
  return bench::run(app, argc, argv, run);
}
