// Trains a case with Tessera, or replicated.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "case.h"
#include "tessera/comm/communicator.h"

namespace tessera::parity {

struct Bytes {
  int64_t gathered = 0, reduced = 0, all_reduced = 0;
  friend bool operator==(const Bytes&, const Bytes&) = default;
  friend std::ostream& operator<<(std::ostream& out, const Bytes& self) {
    return out << self.gathered << " gathered, " << self.reduced << " reduced, " << self.all_reduced << " all-reduced";
  }
};

struct Result {
  std::vector<double> losses;  // means over the ranks, one for each step
  std::vector<double> norms;   // of all gradients; none if the optimizer steps in backward
  std::map<std::string, at::Tensor> state;
  Bytes received;  // by a rank in the last step, up to the end of backward
};

Result train_with_tessera(const Communicator& world, const Case& test);
/// Every rank has a copy of the model, in plain libtorch. What is special in the case is computed as the guides define it.
Result train_replicated(const Communicator& world, const Case& test);

}  // namespace tessera::parity
