#include "tessera/comm/control/envelope.h"

#include <fmt/format.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <limits>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/words.h"

namespace tessera {
namespace {

template <size_t kSize>
std::string_view text(const std::array<char, kSize>& field) {
  return {field.data(), strnlen(field.data(), kSize)};
}

std::string_view dtype_name(int8_t dtype) {
  return c10::toString(static_cast<c10::ScalarType>(dtype));
}

}  // namespace

void Envelope::set_unit(std::string_view name) {
  unit.fill('\0');
  if (name.size() > unit.size()) name.remove_prefix(name.size() - unit.size());
  std::copy(name.begin(), name.end(), unit.begin());
}

void Envelope::set_words(std::string_view text) {
  words.fill('\0');
  text = text.substr(0, words.size());
  std::copy(text.begin(), text.end(), words.begin());
}

void Envelope::refuse(std::string_view why) {
  refused = true;
  set_words(why);
}

std::string_view Envelope::unit_name() const {
  return text(unit);
}

bool Envelope::recovers() const {
  return text(unit) == kRecovery;
}

Extremes Envelope::digest() const {
  if (refused) return {.least = 0, .most = std::numeric_limits<uint64_t>::max()};
  const uint64_t hash = XXH3_64bits(this, offsetof(Envelope, words));
  return {.least = hash, .most = hash};
}

Extremes Envelope::words_digest() const {
  if (!has_words()) return {};
  const uint64_t hash = XXH3_64bits(words.data(), words.size());
  return {.least = hash, .most = hash};
}

std::string Envelope::describe() const {
  std::string result{name(operation)};
  if (!text(unit).empty()) result += fmt::format(" of '{}'", text(unit));
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

namespace {

/// Whether no rank refuses and all are about to do the same. Shards of which a rank does not know who wrote them fit those of all others.
bool all_agree(std::span<const Envelope> envelopes) {
  const auto& first = envelopes.front();
  const auto writer = std::ranges::find_if(envelopes, &Envelope::has_words);
  return std::ranges::all_of(envelopes, [&](const Envelope& other) {
    return !other.refused && std::memcmp(&first, &other, offsetof(Envelope, words)) == 0 &&
           (!other.has_words() || other.words == writer->words);
  });
}

}  // namespace

void expect_agreement(std::span<const Envelope> envelopes, std::span<const int> world_ranks, Callers callers) {
  if (all_agree(envelopes)) return;
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
      message += fmt::format("{} can't take part in {}: {}", name_ranks(ranks), envelope.describe(), text(envelope.words));
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
      const auto words = text(envelope.words);
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
