#include "tessera/comm/trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "tessera/base/atomic_write.h"
#include "tessera/base/folder.h"
#include "tessera/base/run_folder.h"

namespace tessera {
namespace {

using nlohmann::json;

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

  void put(const char* kind, size_t thread, std::string_view name, json event) {
    event.update({{"ph", kind}, {"pid", rank_}, {"tid", thread}, {"name", name}});
    text_ += (text_.empty() ? "" : ",\n") + event.dump(-1, ' ', false, json::error_handler_t::replace);
  }

  void describe(std::string_view kind, size_t thread, std::string_view name) { put("M", thread, kind, {{"args", {{"name", name}}}}); }

  /// The thread of a group. Each group runs one operation at a time, but groups run at the same time.
  size_t thread_of(uint64_t group) {
    const auto found = std::ranges::find(groups_, group);
    const auto thread = static_cast<size_t>(found - groups_.begin()) + 1;
    if (found != groups_.end()) return thread;
    groups_.push_back(group);
    describe("thread_name", thread, thread == 1 ? "communication" : fmt::format("communication {}", thread));
    return thread;
  }

  void add(const Record::Entry& entry) {
    const auto began = microseconds(entry.began);
    if (entry.activity == Activity::Memory) {
      put("C", 0, "memory", {{"ts", began}, {"args", {{*entry.name, entry.bytes}}}});
      return;
    }
    const auto category = name(entry.activity);
    json event = {{"cat", category}, {"ts", began}, {"dur", microseconds(end_of(entry)) - began}};
    if (entry.activity == Activity::Operation) {
      const auto operation = name(entry.operation);
      event["args"] = {{"operation", operation},
                       {"unit", *entry.name},
                       {"group", fmt::format("{:x}", entry.group)},
                       {"sequence", entry.sequence},
                       {"bytes", entry.bytes}};
      put("X", thread_of(entry.group), operation, std::move(event));
      return;
    }
    const bool is_pass = entry.activity == Activity::Pass;
    event["args"] = {{"unit", is_pass ? "" : *entry.name}, {"pass", entry.phase == nullptr ? "" : *entry.phase}};
    put("X", 0, is_pass || (entry.activity == Activity::Unit && !entry.name->empty()) ? *entry.name : category, std::move(event));
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

std::filesystem::path trace_path(const Record& record) {
  const std::filesystem::path folder = record.run.empty() ? "tessera-trace" : record.run;
  return std::filesystem::absolute(folder / fmt::format("trace-{}.json", record.rank));
}

void write_trace(const Record& record) {
  const auto path = trace_path(record);
  make_folder(path.parent_path());
  const auto run = read_run(path.parent_path());
  const auto base = run.is_null() ? 0 : run["started"].get<double>();
  write_text(path, fmt::format("{{\"traceEvents\":[\n{}\n]}}\n", trace_events(record, base)));
}

}  // namespace tessera
