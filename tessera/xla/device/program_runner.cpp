#include "tessera/xla/device/program_runner.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <string_view>
#include <unordered_set>

#include "tessera/xla/device/storage.h"

namespace tessera::xla {
namespace {

/// Barriers change no value: a storage whose value is a leaf behind them has that leaf.
Value behind_barriers(Value value) {
  while (value.node().kind == Node::Kind::Operation && value.node().name == std::string_view("optimization_barrier")) {
    value = Value(value.node().operands[value.result()]);
  }
  return value;
}

/// After a program has failed: storages hold again what they held before it. What they would have got from it is lost.
void give_back(const std::vector<std::vector<Cell*>>& owners, const std::vector<Type>& types) {
  for (size_t i = 0; i < owners.size(); i++) {
    for (auto* const cell : owners[i]) {
      const bool is_there = cell->before && std::ranges::none_of(*cell->before, &pjrt::Buffer::is_donated);
      cell->value = is_there ? leaf(cell->before, cell->before->front().type()) : leaf(std::make_shared<const Data>(), types[i]);
    }
  }
}

}  // namespace

void ProgramRunner::cut() {
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
  if (wanted.empty()) return;
  for (size_t i = 0; i < wanted.size(); i++) {
    for (const auto* const cell : owners[i]) {
      if (cell->before && !held.contains(cell->before.get())) wanted[i].donor = cell->before;
    }
  }
  std::vector<Type> types;
  for (const auto& result : wanted) types.push_back(result.value.type());
  std::vector<std::shared_ptr<const Data>> results;
  try {
    results = run(StepProgram(std::move(wanted)));
  } catch (const std::exception&) {
    give_back(owners, types);
    throw;
  }
  for (size_t i = 0; i < results.size(); i++) {
    const auto value = leaf(results[i], types[i]);
    for (auto* const cell : owners[i]) {
      cell->value = value;
      cell->before = results[i];
    }
  }
}

std::shared_ptr<const Data> ProgramRunner::compute(const Value& value) {
  const auto lock = lock_device();
  if (const auto plain = behind_barriers(value); plain.node().kind == Node::Kind::Data) return expect_values(plain.node().data);
  return run(StepProgram({{value}}))[0];
}

const pjrt::Executable& ProgramRunner::compiled(const StepProgram& step) {
  const auto known = programs_.find(step.key());
  if (known != programs_.end()) {
    metrics_.cache_hits++;
    return known->second;
  }
  const auto began = std::chrono::steady_clock::now();
  const auto program = step.program();
  last_text_ = program.text;
  const pjrt::CompileOptions options{.replicas = replicas_};
  bool was_on_disk = false;
  auto executable = [&] {
    if (!disk_) return client_.compile(program, options);
    auto found = disk_->compile(client_, program, options);
    was_on_disk = found.was_there;
    return std::move(found.executable);
  }();
  metrics_.seconds_compiling += std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  (was_on_disk ? metrics_.loaded_from_disk : metrics_.compiles)++;
  metrics_.memory = executable.compiled().memory();
  return programs_.emplace(step.key(), std::move(executable)).first->second;
}

std::vector<std::shared_ptr<const Data>> ProgramRunner::run(const StepProgram& step) {
  const auto& program = compiled(step);
  std::vector<std::vector<pjrt::Buffer>> arguments;
  for (int replica = 0; replica < replicas_; replica++) arguments.push_back(step.arguments(client_, replica));
  metrics_.executions++;
  auto results = program.run(arguments);
  std::vector<std::shared_ptr<const Data>> all;
  for (size_t i = 0; i < results[0].size(); i++) {
    Data data;
    for (auto& of_replica : results) data.push_back(std::move(of_replica[i]));
    all.push_back(std::make_shared<const Data>(std::move(data)));
  }
  return all;
}

std::shared_ptr<const Data> ProgramRunner::upload(const std::vector<at::Tensor>& tensors) {
  Data data;
  for (int replica = 0; replica < replicas_; replica++) {
    const auto& tensor = tensors[tensors.size() == 1 ? 0 : static_cast<size_t>(replica)];
    metrics_.bytes_uploaded += static_cast<int64_t>(tensor.nbytes());
    data.push_back(client_.upload(tensor, replica));
  }
  return std::make_shared<const Data>(std::move(data));
}

std::vector<at::Tensor> ProgramRunner::download(const Data& data) {
  std::vector<at::Tensor> tensors;
  for (const auto& buffer : data) {
    tensors.push_back(buffer.download());
    metrics_.bytes_downloaded += static_cast<int64_t>(tensors.back().nbytes());
  }
  return tensors;
}

}  // namespace tessera::xla
