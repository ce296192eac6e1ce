#include "tessera/cli/launch/nodes.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/port.h"
#include "tessera/base/process.h"
#include "tessera/base/quiet_thread.h"
#include "tessera/base/words.h"
#include "tessera/comm/host/rendezvous.h"

namespace tessera::cli {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Ending, status, failed, noticed, interrupted, ranks, report, again, why_last)

namespace {

using Json = nlohmann::json;

constexpr auto kPoll = std::chrono::milliseconds(20);
constexpr auto kBeat = std::chrono::seconds(1);
constexpr auto kPatience = std::chrono::milliseconds(200);
constexpr auto kMeeting = std::chrono::seconds(300);  // how long to wait until all nodes are there
constexpr auto kNotice = std::chrono::seconds(10);    // after this time, a line says which nodes are missing
constexpr auto kFarewell = std::chrono::seconds(5);   // how long node 0 waits for others to read the verdict before it ends

std::string name_nodes(const std::set<int>& nodes) {
  return fmt::format("node{} {}", nodes.size() == 1 ? "" : "s", fmt::join(nodes, ", "));
}

std::string address_of(const MeetingPoint& point) {
  return fmt::format("{}:{}", point.host, point.port);
}

StorePtr connect(const LaunchPlan& plan, std::chrono::seconds limit) {
  const auto now = Clock::now();
  const auto place = fmt::format("of node 0 at {}", address_of(plan.point));
  try {
    return serve_or_join({.rank = plan.node, .world_size = plan.nodes}, plan.point,
                         {.end = now + limit, .notice = now + kNotice, .place = place});
  } catch (const TimeoutError& error) {
    throw TimeoutError("node {} found no launcher {} within {} s: {}; check that node 0 runs, and that --rdzv-endpoint names its host", plan.node,
                       place, limit.count(), error.what());
  } catch (const CommError&) {
    if (plan.node > 0) throw;
    throw CommError("node 0 can't listen at {}; check that this is an address of this host, and that no other launcher with --node-rank 0 runs there",
                    address_of(plan.point));
  } catch (const ConfigError& error) {
    throw ConfigError("node {}, at the store {}: {}", plan.node, place, error.what());
  }
}

/// Returns the secret of the ranks of an attempt. Derives it from the secret of the launchers, if they have one, so that it never travels.
std::string secret_of_ranks(const std::string& drawn) {
  const auto given = given_secret();
  return given ? fmt::format("{:02x}", fmt::join(proof_of(*given, {"ranks", drawn}), "")) : drawn;
}

/// Dumps JSON, and replaces bytes that are not UTF-8 in place of throwing.
std::string dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace

std::string too_few_ranks(int left, int least) {
  return fmt::format("{} of at least {} ranks are left, so this was the last attempt", left, least);
}

/// Calls the store. Turns exceptions of the call, which may be of any type, into an error that names node 0.
template <class Call>
auto Nodes::asking_node_0(Call&& call) const {
  const auto gone = [&](const std::string& why) {
    return NodeGone("the launcher of node 0 at {} is gone ({}); see its output", address_of(plan_.point), why);
  };
  if (is_alone_) throw gone(why_alone_);
  try {
    return call();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw gone(first_line(error));
  }
}

Nodes::Nodes(const LaunchPlan& plan, Hooks hooks, std::chrono::seconds limit)
    : plan_(plan), hooks_(std::move(hooks)), store_(connect(plan_, limit)) {
  ::fcntl(news_.read.get(), F_SETFL, O_NONBLOCK);
  // Node 0 counts as lost after the same time without an answer as any other node, but never for itself.
  if (!decides()) store_->setTimeout(plan_.node_timeout);
  watcher_ = quiet_thread([this] { keep_in_touch(); });
}

Nodes::~Nodes() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  watcher_.join();
}

std::string Nodes::key(const std::string& topic) const {
  return fmt::format("{}/{}", attempt_, topic);
}

std::string Nodes::key(const std::string& topic, int node) const {
  return fmt::format("{}/{}", key(topic), node);
}

bool Nodes::is_there(const std::string& key) {
  return asking_node_0([&] { return store_->check({key}); });
}

std::string Nodes::read(const std::string& key) {
  return asking_node_0([&] { return store_->get_to_str(key); });
}

void Nodes::pause() const {
  std::this_thread::sleep_for(kPoll);
  hooks_.wait();
}

std::string Nodes::await(const std::string& key) {
  while (!is_there(key)) pause();
  return read(key);
}

/// Sets attempt_ to the number of the next attempt. Node 0 counts attempts; a launcher that was started while the job runs waits until node
/// 0 begins another attempt, or the job ends.
void Nodes::find_attempt() {
  if (decides()) {
    attempt_++;
    store_->set("nodes", std::to_string(plan_.nodes));
    store_->set("attempt", std::to_string(attempt_));
    return;
  }
  if (const auto nodes = await("nodes"); nodes != std::to_string(plan_.nodes)) {
    throw ConfigError("--nnodes is {} here, but {} on node 0; give all launchers the same number", plan_.nodes, nodes);
  }
  const int before = attempt_;
  bool said = false;
  for (;; pause()) {
    attempt_ = std::stoi(await("attempt"));
    if (attempt_ > before && !is_there(key("plan"))) return;
    if (before >= 0) continue;
    if (is_there(key("verdict"))) {
      auto all = Json::parse(read(key("verdict"))).get<Ending>();
      if (!all.again) throw JobEnded{std::move(all)};
    }
    if (Json::parse(read(key("plan"))).value("max_restarts", 0) <= attempt_)
      throw ConfigError("the job runs already, and there will be no further attempt in which node {} could take part", plan_.node);
    if (!std::exchange(said, true)) hooks_.say("the job runs already; waiting for its next attempt");
  }
}

Share Nodes::meet(int ranks) {
  find_attempt();
  static const auto launcher = random_secret();  // the same when this launcher has lost node 0 and comes back into the attempt
  asking_node_0([&] {
    if (store_->compareSet(key("seen", plan_.node), std::string(), launcher) != launcher) {
      throw ConfigError("there is a node {} already; give each launcher a --node-rank of its own", plan_.node);
    }
    store_->set(key("here", plan_.node), dump({{"ranks", ranks}, {"host", host_name()}, {"id", id_}}));
  });
  if (decides()) invite();
  const auto plan = Json::parse(await(key("plan")));
  if (plan.contains("refusal")) throw TimeoutError(plan["refusal"].get<std::string>());
  Share share = {.attempt = attempt_,
                 .ranks = 0,
                 .world_size = plan.at("world"),
                 .nodes = static_cast<int>(plan.at("members").size()),
                 .host = plan_.point.host,
                 .port = plan.at("port"),
                 .secret = secret_of_ranks(plan.at("secret")),
                 .run = plan.at("run"),
                 .max_restarts = plan.at("max_restarts"),
                 .min_ranks = plan.at("min_ranks")};
  const std::lock_guard lock(mutex_);
  members_.clear();
  for (const auto& member : plan.at("members")) {
    const int node = member.at("node");
    if (node == plan_.node) {
      share.node = static_cast<int>(members_.size());
      share.first_rank = member.at("first");
      share.ranks = member.at("ranks");
    }
    members_[node] = {.host = member.at("host"), .id = member.at("id")};
  }
  if (share.ranks == 0) throw TimeoutError("the next attempt of the job began without node {}, which came too late", plan_.node);
  told_ = false;
  to_tell_ = kNothing;
  beats_.clear();
  lost_.clear();
  runs_ = true;
  return share;
}

/// Node 0 only: waits for the other nodes and writes into the store which node has which ranks.
void Nodes::invite() {
  const auto begin = Clock::now();
  const auto limit = attempt_ == 0 ? kMeeting : plan_.node_timeout;
  bool said = false;
  std::set<int> missing;
  for (int node = 1; node < plan_.nodes; node++) missing.insert(node);
  for (;; pause()) {
    std::erase_if(missing, [&](int node) { return is_there(key("here", node)); });
    const auto waited = Clock::now() - begin;
    if (missing.empty() || waited > limit) break;
    if (waited > kNotice && !std::exchange(said, true)) {
      const auto left = std::chrono::ceil<std::chrono::seconds>(limit - waited).count();
      hooks_.say(fmt::format("waiting for {} of {} to come to {}; giving up in {} s", name_nodes(missing), plan_.nodes,
                             address_of(plan_.point), left));
    }
  }
  Json members = Json::array();
  int world_size = 0;
  for (int node = 0; node < plan_.nodes; node++) {
    if (missing.contains(node)) continue;
    const auto here = Json::parse(read(key("here", node)));
    members.push_back(
        {{"node", node}, {"first", world_size}, {"ranks", here.at("ranks")}, {"host", here.at("host")}, {"id", here.at("id")}});
    world_size += here.at("ranks").get<int>();
  }
  Json plan = {{"members", members}, {"world", world_size}, {"max_restarts", plan_.max_restarts}, {"min_ranks", plan_.min_ranks}};
  const bool may_be_fewer = attempt_ > 0 && plan_.min_ranks > 0;
  if (!missing.empty() && (!may_be_fewer || world_size < plan_.min_ranks)) {
    plan["refusal"] =
        fmt::format("{} of {} did not come to {} within {} s", name_nodes(missing), plan_.nodes, address_of(plan_.point), limit.count());
  } else if (world_size < plan_.min_ranks) {
    plan["refusal"] = fmt::format("--min-ranks {} can't be kept: all nodes together have {}", plan_.min_ranks, counted(world_size, "rank"));
  }
  plan["port"] = free_port();
  plan["secret"] = random_secret();
  plan["run"] = attempt_ == 0 ? run_name() : read("run");
  if (attempt_ == 0) store_->set("run", plan["run"].get<std::string>());
  store_->set(key("plan"), dump(plan));
}

void Nodes::tell(int signal) {
  int nothing = kNothing;
  if (to_tell_.compare_exchange_strong(nothing, signal)) wake_.notify_all();
}

/// Runs in a thread of its own, because a call of the store may block, and the ranks must not wait for it.
void Nodes::keep_in_touch() try {
  const auto store = store_->clone();
  auto next_beat = Clock::now();
  int64_t beats = 0;
  for (std::unique_lock lock(mutex_); !stop_; wake_.wait_for(lock, kPatience)) {
    if (Clock::now() >= next_beat) {
      store->set("beat/" + id_, std::to_string(beats++));
      next_beat = Clock::now() + kBeat;
    }
    if (runs_) look(*store);
  }
} catch (const std::exception& error) {
  why_alone_ = first_line(error);
  is_alone_ = true;
  wake_job(0);
}

void Nodes::look(c10d::Store& store) {
  const auto stop = key("stop");
  if (decides()) watch_others(store);
  if (told_) return;
  if (to_tell_ != kNothing) {
    store.set(stop, std::to_string(to_tell_));
  } else if (store.check({stop})) {
    wake_job(std::stoi(store.get_to_str(stop)));
  } else {
    return;
  }
  told_ = true;
}

void Nodes::watch_others(c10d::Store& store) {
  for (const auto& [node, member] : members_) {
    if (node == 0 || lost_.contains(node) || store.check({key("end", node)})) continue;  // a node whose ranks have ended need not show that it lives
    const auto name = "beat/" + member.id;
    auto beat = store.check({name}) ? store.get_to_str(name) : std::string();
    const auto [entry, is_new] = beats_.try_emplace(node, beat, Clock::now());
    if (is_new || entry->second.first != beat) {
      entry->second = {std::move(beat), Clock::now()};
    } else if (Clock::now() - entry->second.second > plan_.node_timeout) {
      lost_.insert(node);
      tell(0);
      wake_job(0);
    }
  }
}

void Nodes::wake_job(int signal) {
  const auto byte = static_cast<char>(signal);
  [[maybe_unused]] const auto written = ::write(news_.write.get(), &byte, 1);
}

bool Nodes::is_lost(int node) {
  const std::lock_guard lock(mutex_);
  return lost_.contains(node);
}

Ending Nodes::agree(const Ending& own, bool may_restart) {
  asking_node_0([&] { store_->set(key("end", plan_.node), dump(own)); });
  if (decides()) store_->set(key("verdict"), dump(decide(may_restart)));
  const auto all = Json::parse(await(key("verdict"))).get<Ending>();
  asking_node_0([&] { store_->add(key("read"), 1); });
  {
    const std::lock_guard lock(mutex_);
    runs_ = false;
  }
  if (decides() && !all.again) {
    const auto last = Clock::now() + kFarewell;
    const auto present = static_cast<int64_t>(members_.size() - lost_.size());
    while (store_->add(key("read"), 0) < present && Clock::now() < last) pause();
  }
  char rest = 0;  // drops news that came after the ranks here had ended
  while (::read(news_.read.get(), &rest, 1) == 1) {
  }
  return all;
}

/// Node 0 only: waits until each node has said how its ranks ended, or is lost, and returns how the attempt ended.
Ending Nodes::decide(bool may_restart) {
  std::map<int, Ending> ends;
  std::set<int> lost;
  for (const auto& [node, member] : members_) {
    while (!is_there(key("end", node)) && !is_lost(node)) pause();
    if (is_lost(node)) {  // even if it reports now: it was only delayed, and its ranks were stopped because it counted as lost
      lost.insert(node);
    } else {
      ends[node] = Json::parse(read(key("end", node))).get<Ending>();
    }
  }
  Ending all;
  std::optional<int> blamed;
  for (const auto& [node, end] : ends) {
    all.interrupted |= end.interrupted;
    if (end.status != 0 && all.status == 0) all.status = end.status;
    // Blames a node whose rank failed by itself rather than one whose ranks failed because of another node.
    if (end.failed && (!blamed || (ends[*blamed].noticed && !end.noticed))) blamed = node;
  }
  if (!lost.empty()) {
    std::vector<std::string> hosts;
    for (const int node : lost) hosts.push_back(members_[node].host);
    all.report =
        fmt::format("{} ({}) lost: no sign of life for {} s", name_nodes(lost), fmt::join(hosts, ", "), plan_.node_timeout.count());
    if (all.status == 0) all.status = 1;
  } else if (blamed) {
    all.status = ends[*blamed].status;
    all.report = fmt::format("on node {} ({}): {}", *blamed, members_[*blamed].host, ends[*blamed].report);
  }
  all.again = may_restart && !all.interrupted && (blamed || !lost.empty());
  if (all.again && lost.empty()) {  // if nodes are lost, the next attempt waits for them and then counts ranks again
    int left = 0;
    for (const auto& [node, end] : ends) left += end.ranks;
    if (left < plan_.min_ranks) {
      all.again = false;
      all.why_last = too_few_ranks(left, plan_.min_ranks);
    }
  }
  return all;
}

}  // namespace tessera::cli
