#include "tessera/comm/control/envelope.h"

#include <c10/util/FunctionRef.h>
#include <fmt/format.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <functional>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/comm/calling.h"

namespace tessera {
namespace {

std::string_view dtype_name(int8_t dtype) {
  return c10::toString(static_cast<c10::ScalarType>(dtype));
}

/// Ranks with equal envelopes. Lists of Alike are in the order of their first ranks.
struct Alike {
  const Envelope& envelope;
  std::vector<int> ranks;
};
using Alikes = std::vector<Alike>;

/// Whether an envelope is about the same operation on the same unit as the first envelope, but differs in what `of` returns.
bool differ_in(const Alikes& groups, c10::function_ref<uint64_t(const Envelope&)> of) {
  const auto& first = groups.front().envelope;
  return std::ranges::any_of(groups, [&](const Alike& other) {
    return other.envelope.number == first.number && other.envelope.operation == first.operation && of(other.envelope) != of(first);
  });
}

std::string advice_about_calls(const Alikes& groups) {
  std::string who;
  bool is_one = true;
  for (const auto& [envelope, ranks] : groups) {
    is_one = is_one && envelope.call == groups.front().envelope.call;
    if (!envelope.call.empty()) who += fmt::format(" {} called {};", name_ranks(ranks), envelope.call.view());
  }
  if (is_one) return {};
  return who + " every rank must make such a call, so do not put it behind `if (world.rank() == 0)`;";
}

std::string advice_about_passes(const Alikes& groups) {
  const auto of_pass = std::ranges::count_if(groups, [](const Alike& each) { return each.envelope.is_of_pass(); });
  if (of_pass == std::ssize(groups)) {
    const auto& first = groups.front().envelope;
    const auto differ = [&](auto what) {
      return std::ranges::any_of(groups, [&](const Alike& each) { return each.envelope.*what != first.*what; });
    };
    if (!differ(&Envelope::number)) {
      return differ(&Envelope::operation) ? " every rank must run as many forward and as many backward passes between two steps;" : "";
    }
    return " every rank must use the same units in each pass: call the units that a branch leaves out and add their results with a factor of "
           "0, or, if units are node-shared on one host, shard with "
           "{.schedule = {.unused_parameters = tessera::UnusedParameters::Zeros}};";
  }
  const bool are_calls = std::ranges::any_of(groups, [](const Alike& each) { return !each.envelope.call.empty(); });
  if (of_pass == 0 || are_calls) return {};
  std::string who;
  for (const auto& [envelope, ranks] : groups) {
    if (envelope.is_of_pass()) who += fmt::format(" {} {} parameters of the model;", name_ranks(ranks), ranks.size() == 1 ? "uses" : "use");
  }
  return who +
         " every rank must run each forward pass, also in an evaluation, and make the first read of a member, so do not put them behind "
         "`if (world.rank() == 0)`;";
}

std::string advice_about_gradients(const Alikes& groups) {
  const auto adds = [](const Envelope& envelope) -> uint64_t {
    const auto text = envelope.unit.view();
    const auto at = text.find(kEarlierGradients);
    if (at == std::string_view::npos) return 0;
    // From the comma before kEarlierGradients on, such as ", added to 3 earlier gradients #1f2a": the hash tells which gradients they are.
    return std::hash<std::string_view>()(text.substr(text.rfind(',', at)));
  };
  std::string advice;
  if (differ_in(groups, [](const Envelope& envelope) { return envelope.version; })) {
    advice +=
        " only some ranks have written the shards: write them on every rank, also where they are empty, and where a step is left out, call "
        "tessera::skip_step or the optimizer's skip_step(); shard.data_ptr() counts as writing, shard.const_data_ptr() does not;";
  }
  if (differ_in(groups, [](const Envelope& envelope) { return envelope.members; })) {
    advice +=
        " the ranks have gradients for different parameters of the unit: freeze the same ones on every rank, and use the same ones in "
        "every pass (add what uses the others with a factor of 0, or shard with UnusedParameters::Zeros);";
  }
  if (differ_in(groups, adds))
    advice += " only some ranks have cleared the gradients of earlier passes: call zero_grad() on every rank or on none;";
  return advice;
}

std::string advice_about_writers(const Alikes& groups) {
  const auto& first = groups.front().envelope;
  const auto is_other = [&](const Alike& other) { return other.envelope.number == first.number && other.envelope.words != first.words; };
  if (std::ranges::none_of(groups, is_other)) return {};
  const bool beside = std::ranges::any_of(groups, [](const Alike& each) { return each.envelope.words.view().starts_with(kBeside); });
  std::string advice =
      beside ? " the ranks train tensors in no unit to different values:" : " different optimizers have written the shards:";
  for (const auto& [envelope, ranks] : groups) {
    const auto words = envelope.words.view();
    advice += fmt::format(" {} {},", name_ranks(ranks), words.empty() ? beside ? "without" : "none yet" : words);
  }
  if (!beside) return advice + " give every rank the same one, with the same options;";
  return advice +
         " the gradients of such tensors are not averaged: call fully_shard for the whole model last, or tessera::average_gradients for "
         "tensors outside of it; if the ranks are meant to differ, take their gradients by torch::autograd::grad;";
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
  const auto in_call = call.empty() ? std::string() : fmt::format(", in {}", call.view());
  if (operation == Operation::Barrier || operation == Operation::Compare || operation == Operation::Texts) return result + in_call;
  if (operation == Operation::Split) return result + fmt::format(" by colors #{:08x}", layout & 0xffffffff) + in_call;
  if (operation == Operation::Share) return result + fmt::format(": {} bytes for each rank", numel) + in_call;
  result += ":";
  if (pieces != 1) result += fmt::format(" {} pieces,", pieces);
  result += fmt::format(" {} x {}", numel, dtype_name(dtype));
  if (operation == Operation::Broadcast) result += fmt::format(" from rank {}", root);
  if (operation == Operation::ReduceScatter || operation == Operation::AllReduce) {
    result += fmt::format(", {}", name(static_cast<Reduce>(reduce)));
    if (wire_dtype != dtype) result += fmt::format(" sent as {}", dtype_name(wire_dtype));
    if (sum_dtype != dtype) result += fmt::format(" added in {}", dtype_name(sum_dtype));
  }
  return result + in_call;
}

bool Envelope::is_of_pass() const {
  return call.empty() && (number != 0 || unit.view() == kGradientMemory);
}

std::string Envelope::advice_if_alone() const {
  if (!call.empty()) return fmt::format("; every rank must call {}, not only some of them", call.view());
  return is_of_pass() ? std::string(kSameBatches) : std::string();
}

void expect_agreement(std::span<const Envelope> envelopes, std::span<const int> world_ranks, Callers callers) {
  Digest digest;
  for (const auto& each : envelopes) digest.add(each.digest());
  if (digest.agrees()) return;
  Alikes groups;
  bool refused = false;
  for (size_t rank = 0; rank < envelopes.size(); rank++) {
    const auto& own = envelopes[rank];
    refused |= own.refused;
    auto same = std::ranges::find_if(groups, [&](const Alike& group) { return std::memcmp(&group.envelope, &own, sizeof own) == 0; });
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
    throw DisagreementError(message + " a rank that calls tessera::recover had an error of its own: call it on every rank, or end the program");
  }
  for (const auto advice : {advice_about_calls, advice_about_passes, advice_about_gradients, advice_about_writers})
    message += advice(groups);
  message += " every rank must call the same operations, with the same sizes, in the same order";
  if (callers == Callers::SeveralThreads) {
    message +=
        "; several threads of this rank use the group: if they do so at the same time, give each thread a group of its own by "
        "world.duplicate(), called in the same order on every rank";
  }
  throw DisagreementError(message);
}

}  // namespace tessera
