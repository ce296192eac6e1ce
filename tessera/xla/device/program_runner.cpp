#include "tessera/xla/device/program_runner.h"

#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <string_view>
#include <unordered_set>

#include "tessera/base/env.h"
#include "tessera/base/log.h"
#include "tessera/xla/device/storage.h"
#include "tessera/xla/device/wait_at_end.h"

namespace tessera::xla {
namespace {

/// The runner warns if more operations than this are pending: a step of a model with a hundred layers has fewer. It does not start a
/// program at this point, because such programs would end at another place of the loop each time, and each would be compiled anew.
constexpr int64_t kManyOperations = 200000;

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point began) { return std::chrono::duration<double>(Clock::now() - began).count(); }

/// Returns the value without its barriers, which change no value, so that a leaf behind barriers is recognized as a leaf.
Value behind_barriers(Value value) {
  while (value.node().kind == Node::Kind::Operation && value.node().name == std::string_view("optimization_barrier")) {
    value = Value(value.node().operands[value.result()]);
  }
  return value;
}

/// Restores the values that storages had before a failed program. A value whose memory was donated to that program is lost.
void give_back(const std::vector<std::vector<Cell*>>& owners, const std::vector<Type>& types) {
  for (size_t i = 0; i < owners.size(); i++) {
    for (auto* const cell : owners[i]) {
      const bool is_there = cell->before && std::ranges::none_of(*cell->before, &pjrt::Buffer::is_donated);
      cell->value = is_there ? leaf(cell->before, cell->before->front().type()) : leaf(std::make_shared<const Data>(), types[i]);
    }
  }
}

}  // namespace

ProgramRunner::ProgramRunner(std::optional<pjrt::Client> client, int replicas, size_t many_programs)
    : client_(std::move(client)),
      platform_(client_ ? client_->platform() : env("TESSERA_PJRT_PLUGIN").value_or("no device")),
      replicas_(replicas),
      many_programs_(many_programs),
      disk_(client_ ? pjrt::ProgramCache::of_this_user() : std::nullopt),
      folder_(ProgramFolder::of_this_run(platform_, replicas)) {}

/// Counts a read as a cut if a later program of the step needs a result of the program that the read started. Results that either program
/// updates in place do not count: weights and running sums pass from program to program, wherever programs end.
void ProgramRunner::note_cuts(const StepProgram& step) {
  const auto needed = step.arguments_of(Memory::Kept);
  std::erase_if(reads_in_step_, [&](const Read& read) {
    const auto is_needed = [&](const auto& result) { return std::ranges::find(needed, result.lock()) != needed.end(); };
    if (std::ranges::none_of(read.results, is_needed)) return false;
    if (metrics_.host_reads[read.reader]++ == 0) {
      log(LogLevel::Warning,
          "XLA: {} reads a value in the middle of a step, which splits the step into two programs, and all values that the second needs "
          "become results of the first: keep such values as tensors until step_boundary() has been called",
          read.reader);
    }
    return true;
  });
}

void ProgramRunner::note_read(const std::optional<std::string>& reader, const std::vector<std::shared_ptr<const Data>>& results) {
  if (!reader) return reads_in_step_.clear();
  std::erase_if(reads_in_step_, [](const Read& read) { return std::ranges::all_of(read.results, &std::weak_ptr<const Data>::expired); });
  if (!reader->empty()) reads_in_step_.push_back({*reader, {results.begin(), results.end()}});
}

void ProgramRunner::note_operator() {
  metrics_.operators++;
  if (torch::autograd::get_current_graph_task_id() >= 0) traces_backward_ = true;
  if (has_warned_of_growth_ || Node::operations() < kManyOperations) return;
  has_warned_of_growth_ = true;
  log(LogLevel::Warning,
      "XLA: {} operations wait to become one program: call step_boundary() at the end of each step; without it, a loop is only traced, "
      "never computed, until memory is full",
      kManyOperations);
}

void ProgramRunner::note_step(bool is_new) {
  if (!is_new) return history_.ran(last_number_);
  if (const auto replaced = std::exchange(replaced_, std::nullopt)) return history_.replace(last_number_, *replaced, last_text_);
  if (const auto difference = history_.add(last_number_, last_text_)) log(LogLevel::Warning, "XLA: {}", *difference);
}

void ProgramRunner::cut(const std::optional<std::string>& reader) {
  const auto lock = lock_device();
  std::vector<Wanted> wanted;
  std::vector<std::vector<Cell*>> owners;
  std::map<std::pair<const Node*, uint32_t>, size_t> known;
  std::unordered_set<const Data*> held;
  LazyMemory::instance().for_each([&](Cell& cell) {
    if (!cell.value) return;
    if (const auto plain = behind_barriers(cell.value); plain.node().kind == Node::Kind::Data) {
      cell.value = plain;
      held.insert(plain.node().data.get());
      return;
    }
    const auto [place, is_new] = known.try_emplace({&cell.value.node(), cell.value.result()}, wanted.size());
    if (is_new) {
      wanted.push_back({cell.value});
      owners.emplace_back();
    }
    owners[place->second].push_back(&cell);
  });
  if (wanted.empty()) return note_read(reader, {});
  for (size_t i = 0; i < wanted.size(); i++) {
    for (const auto* const cell : owners[i]) {
      if (cell->before && !held.contains(cell->before.get())) wanted[i].donor = cell->before;
    }
  }
  std::vector<Type> types;
  for (const auto& result : wanted) types.push_back(result.value.type());
  const auto programs = metrics_.programs.size();
  std::vector<std::shared_ptr<const Data>> results;
  try {
    StepProgram step(std::move(wanted));
    note_cuts(step);
    results = run(step);
    if (std::exchange(traces_backward_, false)) metrics_.programs[last_number_].has_backward = true;
  } catch (const std::exception&) {
    give_back(owners, types);
    throw;
  }
  if (!reader) note_step(metrics_.programs.size() > programs);
  std::vector<std::shared_ptr<const Data>> first_values;
  for (size_t i = 0; i < results.size(); i++) {
    const auto value = leaf(results[i], types[i]);
    if (std::ranges::none_of(owners[i], [](const Cell* cell) { return cell->before != nullptr; })) first_values.push_back(results[i]);
    for (auto* const cell : owners[i]) {
      cell->value = value;
      cell->before = results[i];
    }
  }
  note_read(reader, first_values);
}

std::shared_ptr<const Data> ProgramRunner::compute(const Value& value) {
  const auto lock = lock_device();
  if (const auto plain = behind_barriers(value); plain.node().kind == Node::Kind::Data) return expect_values(plain.node().data);
  StepProgram step({{value}});
  return run(step)[0];
}

const ProgramRunner::Compiled& ProgramRunner::compiled(StepProgram& step) {
  auto& [numbers, program] = programs_[step.key()];
  replaced_.reset();
  if (numbers.note(step.numbers()) && program) {
    replaced_ = program->number;
    drop(program);
  }
  step.move(numbers.marked());
  if (program) {
    metrics_.cache_hits++;
  } else {
    program = compile(step);
    drop_what_nobody_runs();
  }
  program->last_run = metrics_.executions;
  return *program;
}

void ProgramRunner::drop(std::optional<Compiled>& program) {
  wait();  // the program may still run
  program.reset();
  metrics_.dropped++;
}

void ProgramRunner::drop_what_nobody_runs() {
  if (programs_.size() <= many_programs_) return;
  const auto oldest =
      std::ranges::min_element(programs_, {}, [](const auto& known) { return known.second.program ? known.second.program->last_run : 0; });
  if (oldest->second.program) drop(oldest->second.program);
  programs_.erase(oldest);
}

ProgramRunner::Compiled ProgramRunner::compile(const StepProgram& step) {
  const auto began = Clock::now();
  const auto program = step.program();
  last_text_ = program.text;
  if (folder_) folder_->begin(program.text);
  std::optional<pjrt::Executable> executable;
  bool was_there = false;
  if (client_) {
    const pjrt::CompileOptions options{.replicas = replicas_};
    const auto found = disk_ ? disk_->compile(*client_, program, options) : pjrt::ProgramCache::Found{client_->compile(program, options)};
    executable = found.executable;
    was_there = found.was_there;
    (was_there ? metrics_.loaded_from_disk : metrics_.compiles)++;
  }
  const auto seconds = seconds_since(began);
  metrics_.seconds_compiling += seconds;
  auto& noted = metrics_.programs.emplace_back(ProgramMetrics());
  noted.operations = step.operations();
  noted.seconds = seconds;
  noted.from_disk = was_there;
  if (executable) noted.memory = executable->compiled().memory();
  if (executable && replicas_ > 1) noted.collectives = executable->compiled().collectives();
  if (folder_) folder_->end(executable ? std::optional(executable->compiled()) : std::nullopt);
  return {executable, metrics_.programs.size() - 1, metrics_.executions};
}

std::vector<std::vector<pjrt::Buffer>> ProgramRunner::results_of(const StepProgram& step, const pjrt::Executable& executable) {
  const auto arguments = step.arguments(*client_, replicas_);
  const auto began = Clock::now();
  auto results = executable.run(arguments);
  metrics_.seconds_starting += seconds_since(began);
  // Keeps donated buffers until the next program has started. To free a donated buffer now, a CPU plugin would wait until this program has
  // ended.
  donated_ = step.arguments_of(Memory::Taken);
  // Forgets results that were donated: each was donated to a later program, whose own results are in the list.
  std::erase_if(under_way_, [](const pjrt::Buffer& result) { return result.is_donated() || result.is_ready(); });
  wait_at_end_of_thread([this] { wait(); });
  for (const auto& of_replica : results) {
    if (of_replica.empty()) continue;
    under_way_.push_back(*std::ranges::min_element(of_replica, {}, [](const auto& each) { return each.type().bytes(); }));
  }
  return results;
}

std::vector<std::shared_ptr<const Data>> ProgramRunner::run(StepProgram& step) {
  const auto& program = compiled(step);
  metrics_.executions++;
  metrics_.programs[program.number].executions++;
  last_number_ = program.number;
  if (folder_) folder_->note(metrics_);
  std::vector<std::shared_ptr<const Data>> all;
  if (!program.executable) {
    for (const auto& type : step.results()) all.push_back(absent(type));
    return all;
  }
  auto results = results_of(step, *program.executable);
  for (size_t i = 0; i < results[0].size(); i++) {
    Data data;
    for (auto& of_replica : results) data.push_back(std::move(of_replica[i]));
    all.push_back(std::make_shared<const Data>(std::move(data)));
  }
  return all;
}

/// Returns buffers without memory, which serve as results and arguments of programs that are only traced.
std::shared_ptr<const Data> ProgramRunner::absent(const Type& type) const {
  return std::make_shared<const Data>(static_cast<size_t>(replicas_), pjrt::Buffer::absent(type));
}

std::optional<int64_t> ProgramRunner::peak_memory() const {
  std::optional<int64_t> most;
  if (!client_) return most;
  for (const auto& device : client_->devices()) most = std::max(most, device.peak_memory);
  return most;
}

void ProgramRunner::wait() {
  const auto lock = lock_device();
  for (const auto& result : std::exchange(under_way_, {})) {
    try {
      result.wait();
    } catch (const std::exception&) {  // the program has failed, and so has ended
    }
  }
}

void ProgramRunner::finish() {
  wait();
  if (folder_) folder_->finish(metrics_);
}

std::shared_ptr<const Data> ProgramRunner::upload(const std::vector<at::Tensor>& tensors) {
  if (!client_) return absent({tensors[0].scalar_type(), tensors[0].sizes().vec()});
  Data data;
  for (int replica = 0; replica < replicas_; replica++) {
    const auto& tensor = tensors[tensors.size() == 1 ? 0 : static_cast<size_t>(replica)];
    metrics_.bytes_uploaded += static_cast<int64_t>(tensor.nbytes());
    data.push_back(client_->upload(tensor, replica));
  }
  return std::make_shared<const Data>(std::move(data));
}

at::Tensor ProgramRunner::download(const pjrt::Buffer& buffer) {
  auto tensor = buffer.download();
  metrics_.bytes_downloaded += static_cast<int64_t>(tensor.nbytes());
  return tensor;
}

}  // namespace tessera::xla
