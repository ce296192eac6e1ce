// What the units of a model are, and what they cost.
#pragma once

#include <cstdint>
#include <string>

namespace torch::nn {
class Module;
}

namespace tessera {

/// What a model cost this rank since the last reset.
struct ModelCounters {
  uint64_t gathers = 0;
  uint64_t reductions = 0;
  uint64_t gathered_bytes = 0;  // received
  uint64_t peak_unsharded_bytes = 0;
  uint64_t misses = 0;  // uses that the learnt order did not foresee
};
ModelCounters counters(const torch::nn::Module& module);
void reset_counters(const torch::nn::Module& module);

/// The units, indented by how their modules nest, with their sizes and counters, for people.
std::string describe(const torch::nn::Module& module);

}  // namespace tessera
