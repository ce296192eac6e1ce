#include "tessera/comm/host/link_family.h"

#include <fmt/format.h>

#include <exception>
#include <string>

#include "tessera/base/env.h"
#include "tessera/base/launch_record.h"

namespace tessera {

void LinkFamily::add(const std::shared_ptr<Link>& link) {
  std::lock_guard lock(mutex_);
  std::erase_if(links_, [](const auto& known) { return known.expired(); });
  links_.push_back(link);
}

std::vector<std::shared_ptr<Link>> LinkFamily::alive() {
  std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<Link>> result;
  for (const auto& known : links_) {
    if (auto link = known.lock()) result.push_back(std::move(link));
  }
  return result;
}

void LinkFamily::abort(int world_rank, std::string_view reason, int culprit) noexcept {
  try {
    const auto words = fmt::format("rank {}: {}", world_rank, reason);
    for (const auto& link : alive()) link->abort(words, culprit);
  } catch (const std::exception&) {  // out of memory: the other ranks wait until their time limit
  }
}

int record_culprit(const LinkFailure& failure, int own) noexcept {
  int culprit = own;
  if (!failure.ranks.empty()) culprit = failure.ranks.front();
  if (failure.kind == LinkFailure::Kind::Aborted) culprit = failure.culprit;
  // The launcher knows ranks by the numbers that it gave them. A world of only some of its ranks, or of threads, numbers them otherwise.
  const bool numbers_agree = env("RANK") == std::to_string(own);
  if (numbers_agree && culprit != own) record_failure(own, culprit);
  return culprit;
}

}  // namespace tessera
