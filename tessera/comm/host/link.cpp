#include "tessera/comm/host/link.h"

#include <cstring>

#include "tessera/comm/host/shared_area.h"

namespace tessera {

void Link::visit_all_to_all(std::span<const ConstBytes> to, Visit visit, Clock::time_point deadline) {
  const auto own = to[static_cast<size_t>(rank())];
  std::vector<std::byte> received(own.size() * to.size());
  std::vector<Bytes> from;
  for (size_t r = 0; r < to.size(); r++) from.push_back(Bytes(received).subspan(r * own.size(), own.size()));
  all_to_all(to, from, deadline);
  const std::vector<ConstBytes> rows(from.begin(), from.end());
  visit(0, rows);
}

SharedAttempt Link::share(const AreaShape& /*shape*/, Clock::time_point /*deadline*/) {
  return {.area = nullptr, .why_not = "its ranks have no memory in common"};
}

void copy_own(ConstBytes own, Bytes target) {
  if (!own.empty() && own.data() != target.data()) std::memcpy(target.data(), own.data(), own.size());
}

}  // namespace tessera
