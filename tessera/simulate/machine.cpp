#include "tessera/simulate/machine.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <vector>

#include "tessera/base/atomic_write.h"
#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/input_file.h"

namespace tessera::simulate {
namespace {

/// A number of a machine, by its name in files, and what the built-in machines have.
struct MachineField {
  const char* name;
  double* value;
  double least, cpu, gpu;
};

/// "cpu" is a host of 8 ranks, each with about 16 cores with AVX-512 that share 64 GB in 8 to 12 channels of DDR5; 10 Gbit/s Ethernet. "gpu" is
/// a host of 8 GPUs such as H100: about half of what the data sheet says in bfloat16, 80 GB each; NVLink, and 8 x 400 Gbit/s.
std::vector<MachineField> fields_of(Machine& machine) {
  auto& products = machine.products;
  return {{"product_1_float32", &products[0].float32, 1, 10e9, 1e12},
          {"product_1_bfloat16", &products[0].bfloat16, 1, 5e9, 1e12},
          {"product_16_float32", &products[1].float32, 1, 120e9, 10e12},
          {"product_16_bfloat16", &products[1].bfloat16, 1, 100e9, 20e12},
          {"product_64_float32", &products[2].float32, 1, 400e9, 30e12},
          {"product_64_bfloat16", &products[2].bfloat16, 1, 400e9, 100e12},
          {"product_256_float32", &products[3].float32, 1, 800e9, 45e12},
          {"product_256_bfloat16", &products[3].bfloat16, 1, 1e12, 250e12},
          {"product_1024_float32", &products[4].float32, 1, 1e12, 50e12},
          {"product_1024_bfloat16", &products[4].bfloat16, 1, 2e12, 400e12},
          {"convolution_flops", &machine.convolution_flops, 1, 600e9, 40e12},
          {"bandwidth", &machine.bandwidth, 1, 25e9, 2.5e12},
          {"cached_bandwidth", &machine.cached_bandwidth, 1, 150e9, 5e12},
          {"cache", &machine.cache, 0, 32e6, 40e6},
          {"call", &machine.call, 0, 5e-6, 8e-6},
          {"optimizer_bandwidth", &machine.optimizer_bandwidth, 1, 25e9, 2e12},
          {"inner_latency", &machine.inner.latency, 0, 5e-6, 2e-6},
          {"inner_bandwidth", &machine.inner.bandwidth, 1, 10e9, 300e9},
          {"outer_latency", &machine.outer.latency, 0, 30e-6, 5e-6},
          {"outer_bandwidth", &machine.outer.bandwidth, 1, 10e9 / 8, 8 * 400e9 / 8},
          {"message", &machine.message, 0, 20e-6, 1e-6},
          {"memory", &machine.memory, 0, 8 * 64e9, 8 * 80e9}};
}

Machine read_machine(const std::filesystem::path& path) {
  const auto json = nlohmann::json::parse(InputFile(path).read_all(), nullptr, /*allow_exceptions=*/false);
  if (!json.is_object())
    throw ConfigError("{} is damaged or not the file of a machine: it is not a JSON object; measure the machine anew: "
                      "tessera test --calibrate FILE", path);
  const auto expect = [&](const std::string& name, const auto& is_good, const std::string& must) {
    const auto field = json.value(name, nlohmann::json());
    if (!is_good(field))
      throw ConfigError("{}: {} is {}, but must be {}; measure the machine anew: tessera test --calibrate FILE", path, name, field.dump(),
                        must);
    return field;
  };
  Machine machine;
  machine.kind = expect("kind", [](const auto& kind) { return kind == "cpu" || kind == "gpu"; }, "cpu or gpu");
  const auto is_count = [](const auto& ranks) { return ranks.is_number_integer() && ranks >= 1 && ranks <= 4096; };
  machine.ranks_per_host = expect("ranks_per_host", is_count, "a whole number from 1 to 4096");
  for (const auto& field : fields_of(machine)) {
    const auto is_good = [&](const auto& number) { return number.is_number() && number >= field.least; };
    *field.value = expect(field.name, is_good, fmt::format("a number, {} or more", field.least));
  }
  return machine;
}

/// Speeds between two sides are on a line over the logarithm of the side; below the smallest side they fall with the side.
double product_speed(const Machine& machine, double side, double ProductSpeed::*dtype) {
  const auto speed = [&](size_t i) { return machine.products[i].*dtype; };
  const auto above = static_cast<size_t>(std::ranges::lower_bound(kProductSides, side) - kProductSides.begin());
  if (above == kProductSides.size()) return speed(above - 1);
  if (above == 0) return speed(0) * std::max(side, 1.0) / kProductSides[0];
  const double below = kProductSides[above - 1];
  const auto part = std::log(side / below) / std::log(kProductSides[above] / below);
  return speed(above - 1) + part * (speed(above) - speed(above - 1));
}

double ProductSpeed::*speed_of(at::ScalarType dtype) {
  return c10::elementSize(dtype) == 2 ? &ProductSpeed::bfloat16 : &ProductSpeed::float32;
}

/// Processors take twice as long for float64, and GPUs for gaming more, which train in it rarely.
double factor_of(at::ScalarType dtype) {
  return c10::elementSize(dtype) > 4 ? 2 : 1;
}

}  // namespace

Machine Machine::named(const std::string& name) {
  if (name != "cpu" && name != "gpu") {
    if (!is_there(name))
      throw ConfigError("there is no machine {}: give cpu, gpu, or the file of tessera test --calibrate", name);
    return read_machine(name);
  }
  Machine machine{.kind = name, .ranks_per_host = 8};
  for (const auto& field : fields_of(machine)) *field.value = name == "cpu" ? field.cpu : field.gpu;
  return machine;
}

void Machine::write(const std::filesystem::path& file) const {
  auto machine = *this;
  nlohmann::ordered_json json = {{"kind", kind}, {"ranks_per_host", ranks_per_host}};
  for (const auto& field : fields_of(machine)) json[field.name] = *field.value;
  write_text(file, json.dump(2) + "\n");
}

double Machine::product_seconds(double flops, double smallest_side, at::ScalarType dtype) const {
  return call + flops * factor_of(dtype) / product_speed(*this, smallest_side, speed_of(dtype));
}

double Machine::convolution_seconds(double flops, at::ScalarType dtype) const {
  const auto ratio = products.back().*speed_of(dtype) / products.back().float32;
  return call + flops * factor_of(dtype) / (convolution_flops * ratio);
}

double Machine::pass_seconds(double bytes) const {
  return call + bytes / (bytes > cache ? bandwidth : cached_bandwidth);
}

double Machine::optimizer_seconds(double bytes) const {
  return call + bytes / optimizer_bandwidth;
}

}  // namespace tessera::simulate
