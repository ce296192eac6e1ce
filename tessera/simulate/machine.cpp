#include "tessera/simulate/machine.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "tessera/base/atomic_write.h"
#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/input_file.h"

namespace tessera::simulate {
namespace {

using MachineJson = nlohmann::ordered_json;

constexpr auto kWayOut = "measure the machine anew: tessera test --calibrate FILE";

/// The fields that are plain numbers.
constexpr std::array kNumbers = {
    std::pair{"convolution_flops", &Machine::convolution_flops},
    std::pair{"bandwidth", &Machine::bandwidth},
    std::pair{"cached_bandwidth", &Machine::cached_bandwidth},
    std::pair{"cache", &Machine::cache},
    std::pair{"call", &Machine::call},
    std::pair{"optimizer_bandwidth", &Machine::optimizer_bandwidth},
    std::pair{"message", &Machine::message},
    std::pair{"memory", &Machine::memory},
};

/// Reads fields of an object in the file, and names the file and the field in errors.
struct MachineFile {
  const std::filesystem::path& path;
  const MachineJson& object;
  std::string prefix = {};

  const MachineJson& at(const std::string& field) const {
    const auto found = object.find(field);
    if (found == object.end()) throw ConfigError("{}: {}{} is missing; {}", path, prefix, field, kWayOut);
    return *found;
  }
  [[noreturn]] void refuse(const std::string& field, std::string_view must) const {
    throw ConfigError("{}: {}{} is {}, but must be {}; {}", path, prefix, field, at(field).dump(), must, kWayOut);
  }
  double number(const std::string& field, double least) const {
    const auto& value = at(field);
    if (!value.is_number() || value.get<double>() < least) refuse(field, least > 0 ? "a positive number" : "a number that is not negative");
    return value.get<double>();
  }
  double positive(const std::string& field) const { return number(field, 1e-300); }
  MachineLink link(const std::string& field) const {
    if (!at(field).is_object()) refuse(field, "an object with latency and bandwidth");
    const MachineFile inside{path, at(field), prefix + field + "."};
    return {.latency = inside.number("latency", 0), .bandwidth = inside.positive("bandwidth")};
  }
};

Machine read_machine(const std::filesystem::path& path) {
  const auto json = MachineJson::parse(InputFile(path).read_all(), nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) throw IoError("{} is damaged: it is not a JSON object; {}", path, kWayOut);
  const MachineFile file{path, json};
  Machine machine;
  if (file.at("kind") != "cpu" && file.at("kind") != "gpu") file.refuse("kind", "\"cpu\" or \"gpu\"");
  file.at("kind").get_to(machine.kind);
  const auto& products = file.at("products");
  if (!products.is_array() || products.empty()) file.refuse("products", "a list of speeds");
  for (size_t i = 0; i < products.size(); i++) {
    if (!products[i].is_object()) file.refuse("products", "a list of objects");
    const MachineFile entry{path, products[i], fmt::format("products[{}].", i)};
    const auto least = machine.products.empty() ? 0 : machine.products.back().side;
    if (entry.positive("side") <= least) entry.refuse("side", "larger than the one before");
    machine.products.push_back(
        {.side = entry.positive("side"), .float32 = entry.positive("float32"), .bfloat16 = entry.positive("bfloat16")});
  }
  for (const auto& [name, member] : kNumbers) {
    const bool divides = std::string_view(name).ends_with("bandwidth") || member == &Machine::convolution_flops;
    machine.*member = divides ? file.positive(name) : file.number(name, 0);
  }
  const auto& ranks = file.at("ranks_per_host");
  if (!ranks.is_number_integer() || ranks < 1 || ranks > 4096) file.refuse("ranks_per_host", "a whole number from 1 to 4096");
  ranks.get_to(machine.ranks_per_host);
  machine.inner = file.link("inner");
  machine.outer = file.link("outer");
  return machine;
}

/// Speeds between two sides are on a line over the logarithm of the side; below the smallest side they fall with the side.
double product_speed(const Machine& machine, double side, double ProductSpeed::*dtype) {
  const auto& all = machine.products;
  const auto above = std::ranges::find_if(all, [&](const ProductSpeed& one) { return one.side >= side; });
  if (above == all.end()) return all.back().*dtype;
  if (above == all.begin()) return all.front().*dtype * std::max(side, 1.0) / all.front().side;
  const auto& below = *std::prev(above);
  const auto part = std::log(side / below.side) / std::log(above->side / below.side);
  return below.*dtype + part * ((*above).*dtype - below.*dtype);
}

double ProductSpeed::*speed_of(at::ScalarType dtype) {
  return c10::elementSize(dtype) == 2 ? &ProductSpeed::bfloat16 : &ProductSpeed::float32;
}

/// Processors take twice as long for float64, and GPUs for gaming more, which train in it rarely.
double factor_of(at::ScalarType dtype) {
  return c10::elementSize(dtype) > 4 ? 2 : 1;
}

}  // namespace

Machine Machine::cpu() {
  // A host of 8 ranks, each with about 16 cores with AVX-512 that share 64 GB in 8 to 12 channels of DDR5; 10 Gbit/s Ethernet.
  return {.kind = "cpu",
          .products = {{1, 10e9, 5e9}, {16, 120e9, 100e9}, {64, 400e9, 400e9}, {256, 800e9, 1e12}, {1024, 1e12, 2e12}},
          .convolution_flops = 600e9,
          .bandwidth = 25e9,
          .cached_bandwidth = 150e9,
          .cache = 32e6,
          .call = 5e-6,
          .optimizer_bandwidth = 25e9,
          .ranks_per_host = 8,
          .inner = {.latency = 5e-6, .bandwidth = 10e9},
          .outer = {.latency = 30e-6, .bandwidth = 10e9 / 8},
          .message = 20e-6,
          .memory = 8 * 64e9};
}

Machine Machine::gpu() {
  // A host of 8 GPUs such as H100: about half of what the data sheet says in bfloat16, 80 GB each; NVLink, and 8 x 400 Gbit/s.
  return {.kind = "gpu",
          .products = {{1, 1e12, 1e12}, {16, 10e12, 20e12}, {64, 30e12, 100e12}, {256, 45e12, 250e12}, {1024, 50e12, 400e12}},
          .convolution_flops = 40e12,
          .bandwidth = 2.5e12,
          .cached_bandwidth = 5e12,
          .cache = 40e6,
          .call = 8e-6,
          .optimizer_bandwidth = 2e12,
          .ranks_per_host = 8,
          .inner = {.latency = 2e-6, .bandwidth = 300e9},
          .outer = {.latency = 5e-6, .bandwidth = 8 * 400e9 / 8},
          .message = 1e-6,
          .memory = 8 * 80e9};
}

Machine Machine::named(const std::string& name) {
  if (name == "cpu") return cpu();
  if (name == "gpu") return gpu();
  return read_machine(name);
}

Machine Machine::of_environment() {
  return named(env("TESSERA_MACHINE").value_or("cpu"));
}

void Machine::write(const std::filesystem::path& file) const {
  MachineJson json = {{"kind", kind}, {"products", MachineJson::array()}};
  for (const auto& one : products) {
    json["products"].push_back({{"side", one.side}, {"float32", one.float32}, {"bfloat16", one.bfloat16}});
  }
  for (const auto& [name, member] : kNumbers) json[name] = this->*member;
  json["ranks_per_host"] = ranks_per_host;
  for (const auto& [name, link] : {std::pair{"inner", inner}, std::pair{"outer", outer}}) {
    json[name] = {{"latency", link.latency}, {"bandwidth", link.bandwidth}};
  }
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
