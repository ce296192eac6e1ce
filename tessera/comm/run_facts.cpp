#include "tessera/comm/run_facts.h"

#include <errno.h>
#include <fmt/format.h>
#include <stdlib.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <utility>

#include "tessera/base/clock.h"
#include "tessera/base/error.h"
#include "tessera/base/fd.h"
#include "tessera/base/folder.h"
#include "tessera/base/last_words.h"
#include "tessera/base/launcher.h"
#include "tessera/base/log.h"
#include "tessera/base/no_copy.h"
#include "tessera/base/run_folder.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/record.h"
#include "tessera/comm/trace.h"
#include "tessera/comm/unit_figures.h"

namespace tessera {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(StepTimes, steps, compute, unshard, reduce, optimizer, other)

namespace {

using nlohmann::json;

constexpr double kBetweenLines = 1, kBetweenCounts = 50e-3;  // seconds
constexpr auto kEndPatience = std::chrono::seconds(1);       // how long the end of the process waits for a thread that writes

std::vector<std::string> own_command() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> words;
  for (std::string word; std::getline(file, word, '\0');) words.push_back(word);
  return words;
}

/// Without what host_id() adds after a slash.
std::string name_of_host(const std::string& host) {
  return host.substr(0, host.find('/'));
}

/// Writes the files of this rank.
class RunFiles : NoCopy {
 public:
  RunFiles(std::filesystem::path folder, std::shared_ptr<Record> record, const RunStart& start)
      : folder_(std::move(folder)), record_(std::move(record)), leads_(start.rank == 0) {
    run_ = run_to_continue(folder_, static_cast<int>(start.hosts.size()), restart_count());
    const std::string program = ::program_invocation_short_name;
    if (const auto before = run_.is_null() ? json(program) : run_.value("program", json(program)); leads_ && before != program) {
      throw ConfigError("the folder {} has the record of the program {}, not of '{}'; record this run in another folder", folder_,
                        before.dump(), program);
    }
    make_folder(folder_);
    lines_ = open_lines(folder_, start.rank);
    std::error_code unknown;
    std::filesystem::remove(folder_ / fmt::format("trace-{}.json", start.rank), unknown);  // of an earlier attempt
    if (!leads_) return;
    if (run_.is_null()) {
      run_ = {{"started", unix_now()}, {"flops_per_step", nullptr}, {"peak_flops", nullptr}, {"units", json::array()}};
    } else {
      json before = json::object();
      for (const auto* const fact : {"command", "world", "status", "ended", "cause"}) {
        if (run_.contains(fact)) before[fact] = run_[fact];
      }
      if (!run_["earlier"].is_array()) run_["earlier"] = json::array();
      run_["earlier"].push_back(before);
      run_.erase("cause");
    }
    auto hosts = json::array();
    for (const auto& host : start.hosts) hosts.push_back(name_of_host(host));
    run_.update({{"format", 1},
                 {"program", program},
                 {"command", own_command()},
                 {"world", hosts.size()},
                 {"hosts", hosts},
                 {"engine", start.engine},
                 {"device", c10::DeviceTypeName(start.device, /*lower_case=*/true)},
                 {"ended", nullptr},
                 {"status", "runs"}});
    write_run(folder_, run_);
  }

  const std::shared_ptr<Record>& record() const { return record_; }

  /// Called in the thread that ends a step.
  void end_step() {
    const std::lock_guard lock(mutex_);
    const auto now = seconds_now();
    if (counted_ != 0 && now - counted_ < kBetweenCounts) return;
    counted_ = now;
    now_ = record_->figures();
    for (const auto& [kind, bytes] : now_.memory) {
      if (kind != "unsharded") record_->note_memory(kind, bytes);
    }
    if (last_ != 0 && now - last_ < kBetweenLines) return;
    last_ = now;
    try_to([&] { tell_units(); });
    try_to([&] { add_line(); });
  }

  void merge(const json& facts) {
    const std::lock_guard lock(mutex_);
    if (!leads_) return;
    run_.update(facts);
    try_to([&] { write_run(folder_, run_); });
  }

  void end(const char* status) noexcept {
    if (has_ended_.exchange(true) || ::getpid() != process_) return;
    const std::unique_lock lock(mutex_, kEndPatience);
    if (!lock.owns_lock()) return;
    try_to([&] { add_line(); });
    try_to([&] { write_trace(*record_); });
    if (!leads_) return;
    try_to([&] {
      run_.update({{"ended", unix_now()}, {"status", status}});
      write_run(folder_, run_);
    });
  }

 private:
  /// A program trains on if its record can't be written.
  template <class Act>
  void try_to(const Act& act) noexcept try {
    act();
  } catch (const std::exception& error) {
    if (!std::exchange(has_warned_, true)) log(LogLevel::Warning, "the record of the run in {} is not complete: {}", folder_, error.what());
  }

  void tell_units() {
    if (!leads_ || now_.models.empty() || now_.models == told_) return;
    told_ = now_.models;
    auto& units = run_["units"] = json::array();
    for (const auto& model : told_) {
      for (const auto& unit : *model) units.push_back(unit);
    }
    write_run(folder_, run_);
  }

  void add_line() {
    const auto times = record_->take_times();
    step_ += times.steps;
    auto bytes = now_.memory;
    bytes["process"] = resident_bytes();
    json line = times;
    line.update({{"time", unix_now()},
                 {"step", step_},
                 {"seconds", times.compute + times.unshard + times.reduce + times.optimizer + times.other},
                 {"host", record_->host},
                 {"memory", bytes},
                 {"place", record_->place()}});
    for (const auto& [counter, count] : now_.counters) {
      const auto before = std::exchange(before_[counter], count);
      line[counter] = count >= before ? count - before : count;  // programs may reset counters
    }
    const auto text = line.dump(-1, ' ', false, json::error_handler_t::replace) + "\n";
    if (::write(lines_.get(), text.data(), text.size()) != std::ssize(text)) throw IoError("{}", why_unwritable(errno));
  }

  const std::filesystem::path folder_;
  const std::shared_ptr<Record> record_;
  const bool leads_;
  const pid_t process_ = ::getpid();
  std::timed_mutex mutex_;
  Fd lines_;
  json run_;  // run.json, on the rank that writes it
  ModelFigures now_;  // as they were taken last, because models are gone when the process ends
  std::vector<ModelUnits> told_;            // the models in run.json
  std::map<std::string, uint64_t> before_;  // the counters at the last line
  double last_ = 0, counted_ = 0;           // when the last line was written, and when figures were taken last
  uint64_t step_ = 0;
  bool has_warned_ = false;
  std::atomic<bool> has_ended_ = false;
};

// Never destroyed, because it is used until the process ends.
std::atomic<RunFiles*> run_files = nullptr;
std::terminate_handler terminate_before = nullptr;

[[noreturn]] void end_run_and_terminate() {
  run_files.load()->end("failed");
  terminate_before();
  std::abort();
}

std::shared_ptr<Record>& first() {
  static auto& record = *new std::shared_ptr<Record>();
  return record;
}
std::mutex first_mutex;

}  // namespace

void record_facts(const Communicator& world, const json& facts) {
  if (!facts.is_object()) throw UsageError("record_facts takes an object, such as {{{{\"peak_flops\", 2e14}}}}");
  if (auto* const run = run_files.load(); run != nullptr && run->record() == world.record()) run->merge(facts);
}

void start_run(const std::shared_ptr<Record>& record, const RunStart& start) {
  record->rank = start.rank;
  record->host = name_of_host(start.hosts[static_cast<size_t>(start.rank)]);
  {
    const std::lock_guard lock(first_mutex);
    if (first() != nullptr) return;
    first() = record;
  }
  const auto folder = run_folder();
  if (!folder) return;
  auto* const run = new RunFiles(*folder, record, start);
  record->run = folder->string();
  record->on_step([run] { run->end_step(); });
  run_files = run;
  ::on_exit([](int status, void*) { run_files.load()->end(status == 0 ? "done" : "failed"); }, nullptr);
  say_last_words();  // before the handler, which has to come first
  terminate_before = std::set_terminate(end_run_and_terminate);
}

std::shared_ptr<Record> first_record() {
  const std::lock_guard lock(first_mutex);
  return first();
}

}  // namespace tessera
