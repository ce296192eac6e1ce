#include "tessera/comm/trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <nlohmann/json.hpp>

#include "tessera/base/atomic_write.h"
#include "tessera/base/folder.h"

namespace tessera {
namespace {

constexpr const char* kCategories[] = {"pass", "unit", "unshard", "reduce", "optimizer", "collective"};

std::string json_text(std::string_view text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

/// Makes the events of one record.
class Events {
 public:
  Events(const Record& record, double base) : shot_(record.snapshot()), offset_(shot_.to_unix - base), rank_(record.rank) {
    describe("process_name", 0, record.host.empty() ? fmt::format("rank {}", rank_) : fmt::format("rank {} ({})", rank_, record.host));
    describe("thread_name", 0, "program");
  }

  std::string from(double from) && {
    for (const auto& entry : shot_.entries) {
      if (end_of(entry) + shot_.to_unix >= from) add(entry);
    }
    return std::move(text_);
  }

 private:
  double end_of(const Record::Entry& entry) const { return entry.outcome == Record::Outcome::Running ? shot_.now : entry.ended; }
  /// Whole microseconds, so that spans which touch or contain each other still do so.
  int64_t microseconds(double time) const { return std::llround((time + offset_) * 1e6); }

  void begin(std::string_view kind, size_t thread) {
    fmt::format_to(std::back_inserter(text_), R"({}{{"ph":"{}","pid":{},"tid":{})", text_.empty() ? "" : ",\n", kind, rank_, thread);
  }

  void describe(std::string_view what, size_t thread, std::string_view name) {
    begin("M", thread);
    fmt::format_to(std::back_inserter(text_), R"(,"name":"{}","args":{{"name":{}}}}})", what, json_text(name));
  }

  /// The thread of a group. Each group runs one operation at a time, but groups run at the same time.
  size_t thread_of(uint64_t group) {
    const auto found = std::ranges::find(groups_, group);
    const auto thread = static_cast<size_t>(found - groups_.begin()) + 1;
    if (found != groups_.end()) return thread;
    groups_.push_back(group);
    describe("thread_name", thread, thread == 1 ? std::string("communication") : fmt::format("communication {}", thread));
    return thread;
  }

  void add(const Record::Entry& entry) {
    const auto out = std::back_inserter(text_);
    const auto began = microseconds(entry.began);
    if (entry.activity == Activity::Memory) {
      begin("C", 0);
      fmt::format_to(out, R"(,"name":"memory","ts":{},"args":{{{}:{}}}}})", began, json_text(*entry.name), entry.bytes);
      return;
    }
    const bool is_operation = entry.activity == Activity::Operation;
    const auto thread = is_operation ? thread_of(entry.group) : 0;
    const auto* const category = kCategories[static_cast<size_t>(entry.activity)];
    auto name = is_operation ? std::string(tessera::name(entry.operation)) : *entry.name;
    if (entry.activity == Activity::Unshard || entry.activity == Activity::Reduce || name.empty()) name = category;
    begin("X", thread);
    fmt::format_to(out, R"(,"cat":"{}","name":{},"ts":{},"dur":{},"args":{{)", category, json_text(name), began,
                   microseconds(end_of(entry)) - began);
    if (is_operation) {
      fmt::format_to(out, R"("operation":{},"unit":{},"group":"{:x}","sequence":{},"bytes":{}}}}})", json_text(name), json_text(*entry.name),
                     entry.group, entry.sequence, entry.bytes);
    } else {
      const auto phase = entry.phase == nullptr ? std::string() : *entry.phase;
      fmt::format_to(out, R"("unit":{},"pass":{}}}}})", json_text(entry.activity == Activity::Pass ? "" : *entry.name), json_text(phase));
    }
  }

  const Record::Snapshot shot_;
  const double offset_;
  const int rank_;
  std::vector<uint64_t> groups_;
  std::string text_;
};

}  // namespace

std::string trace_events(const Record& record, double base, double from) {
  return Events(record, base).from(from);
}

std::filesystem::path write_trace(const Record& record) {
  const std::filesystem::path folder = record.trace_folder.empty() ? "tessera-trace" : record.trace_folder;
  make_folder(folder);
  auto path = std::filesystem::absolute(folder / fmt::format("trace-{}.json", record.rank));
  write_text(path, fmt::format("{{\"traceEvents\":[\n{}\n]}}\n", trace_events(record, record.started)));
  return path;
}

}  // namespace tessera
