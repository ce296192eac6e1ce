#include "tessera/comm/control/envelope.h"

#include <fmt/format.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/words.h"

namespace tessera {
namespace {

std::string_view dtype_name(int8_t dtype) {
  return c10::toString(static_cast<c10::ScalarType>(dtype));
}

}  // namespace

void Envelope::refuse(std::string_view why) {
  refused = true;
  words.assign_prefix(why);
}

Digest Envelope::digest() const {
  if (refused) return Digest::unfit();
  return {.what = Extremes::of(XXH3_64bits(this, offsetof(Envelope, words))),
          .known = words.empty() ? Extremes() : Extremes::of(XXH3_64bits(words.chars.data(), words.chars.size()))};
}

std::string Envelope::describe() const {
  std::string result{name(operation)};
  if (!unit.empty()) result += fmt::format(" of '{}'", unit.view());
  if (number != 0) result += fmt::format(" (unit {})", number);
  if (version != 0) result += fmt::format(" version {}", version);
  if (operation == Operation::Barrier || operation == Operation::Compare || operation == Operation::Texts) return result;
  if (operation == Operation::Split) return result + fmt::format(" by colors #{:08x}", layout & 0xffffffff);
  if (operation == Operation::Share) return result + fmt::format(": {} bytes for each rank", numel);
  result += ":";
  if (pieces != 1) result += fmt::format(" {} pieces,", pieces);
  result += fmt::format(" {} x {}", numel, dtype_name(dtype));
  if (operation == Operation::Broadcast) result += fmt::format(" from rank {}", root);
  if (operation == Operation::ReduceScatter || operation == Operation::AllReduce) {
    result += fmt::format(", {}", name(static_cast<Reduce>(reduce)));
    if (wire_dtype != dtype) result += fmt::format(" sent as {}", dtype_name(wire_dtype));
    if (sum_dtype != dtype) result += fmt::format(" added in {}", dtype_name(sum_dtype));
  }
  return result;
}

void expect_agreement(std::span<const Envelope> envelopes, std::span<const int> world_ranks, Callers callers) {
  Digest digest;
  for (const auto& each : envelopes) digest.add(each.digest());
  if (digest.agrees()) return;
  // Each group consists of ranks with equal envelopes; the groups are in the order of their first ranks.
  struct Group {
    const Envelope& envelope;
    std::vector<int> ranks;
  };
  std::vector<Group> groups;
  bool refused = false;
  for (size_t rank = 0; rank < envelopes.size(); rank++) {
    const auto& own = envelopes[rank];
    refused |= own.refused;
    auto same = std::ranges::find_if(groups, [&](const Group& group) { return std::memcmp(&group.envelope, &own, sizeof own) == 0; });
    if (same == groups.end()) {
      groups.push_back({.envelope = own, .ranks = {}});
      same = groups.end() - 1;
    }
    same->ranks.push_back(world_ranks[rank]);
  }
  if (refused) {
    std::string message;
    for (const auto& [envelope, ranks] : groups) {
      if (!envelope.refused) continue;
      if (!message.empty()) message += "; ";
      message += fmt::format("{} can't take part in {}: {}", name_ranks(ranks), envelope.describe(), envelope.words.view());
    }
    throw UsageError(std::move(message));
  }
  std::string message = "ranks disagree about what to do next:";
  for (const auto& [envelope, ranks] : groups) {
    message += fmt::format(" {} at operation {}: {};", name_ranks(ranks), envelope.sequence, envelope.describe());
  }
  if (std::ranges::any_of(envelopes, &Envelope::recovers)) {
    throw DisagreementError(message + " a rank that calls tessera::recover has met an error of its own: call it on every rank, or end");
  }
  const auto older = [&](const Envelope& other) {
    return other.number == envelopes.front().number && other.version != envelopes.front().version;
  };
  if (std::ranges::any_of(envelopes, older)) {
    message +=
        " the shards were written on some ranks only: write them on every rank, also where they are empty, and say tessera::skip_step (or "
        "the optimizer's own) for a step that is left out; shard.data_ptr() counts as writing, shard.const_data_ptr() does not;";
  }
  const auto other_members = [&](const Envelope& other) {
    return other.number == envelopes.front().number && other.members != envelopes.front().members;
  };
  if (std::ranges::any_of(envelopes, other_members)) {
    message +=
        " the ranks have gradients for different parameters of the unit: freeze the same ones on every rank, and use the same ones in "
        "every pass (add the others with a factor of 0);";
  }
  const auto other_writer = [&](const Envelope& other) {
    return other.number == envelopes.front().number && other.words != envelopes.front().words;
  };
  if (std::ranges::any_of(envelopes, other_writer)) {
    message += " different optimizers have written the shards:";
    for (const auto& [envelope, ranks] : groups) {
      const auto words = envelope.words.view();
      message += fmt::format(" {} {},", name_ranks(ranks), words.empty() ? "none yet" : words);
    }
    message += " give every rank the same one, with the same options;";
  }
  message += " every rank must call the same operations, with the same sizes, in the same order";
  if (callers == Callers::SeveralThreads) {
    message +=
        "; several threads of this rank have called the group: if they do so at the same time, each needs one of its own, made in the same "
        "order on every rank, by world.duplicate()";
  }
  throw DisagreementError(message);
}

}  // namespace tessera
