#include "tessera/comm/levels/connect.h"

#include <array>

#include "tessera/base/env.h"
#include "tessera/base/log.h"
#include "tessera/comm/levels/levels_link.h"
#include "tessera/comm/shm/shm_link.h"

namespace tessera {

int most_levels() {
  constexpr std::array<std::string_view, 2> kLevels = {"1", "2"};
  return static_cast<int>(env_choice("TESSERA_LEVELS", kLevels).value_or(1)) + 1;
}

Connection with_two_levels(Connection outer, const Meeting& meeting) {
  const auto& topology = meeting.topology;
  if (topology.hosts() == 1 || topology.hosts() == topology.ranks()) return outer;
  auto inner = connect_shm(meeting);
  if (!inner.link) {
    log(meeting.identity.rank == 0 ? LogLevel::Warning : LogLevel::Debug,
        "every rank sends to all ranks of the other hosts, because the ranks of a host share no memory: {}", inner.why_not);
    return outer;
  }
  log(LogLevel::Info, "two levels: data crosses the network once a host; {} of the {} ranks are on this one of {} hosts",
      inner.link->size(), topology.ranks(), topology.hosts());
  return {.link = std::make_shared<LevelsLink>(std::move(inner.link), std::move(outer.link), topology)};
}

}  // namespace tessera
