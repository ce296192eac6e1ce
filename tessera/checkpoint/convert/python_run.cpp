#include "tessera/checkpoint/convert/python_run.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <iterator>
#include <map>

#include "tessera/base/error.h"
#include "tessera/checkpoint/formats/torch/pickle.h"
#include "tessera/checkpoint/live/generator_state.h"
#include "tessera/checkpoint/stored/runs.h"

namespace tessera::checkpoint {

PythonEntries python_model(const RunSource& source) {
  PythonEntries entries;
  for (const auto& tensor : source.model()) entries.push_back({{"model", tensor.name}, tensor});
  for (const auto& [alias, name] : source.run().catalog.aliases) {
    const auto first = std::ranges::find(source.model(), name, &SourceTensor::name);
    if (first != source.model().end()) entries.push_back({{"model", alias}, *first});
  }
  return entries;
}

PythonEntries python_optimizer(const RunSource& source, bool numbered) {
  if (numbered && !source.notes().contains(kSettingsNote)) {
    throw UsageError(
        "without FSDP, Accelerate knows the optimizer's parameters by numbers, and this checkpoint does not say in which order the "
        "optimizer has them; save with checkpoint::save in this format, or convert the weights only (.weights_only = true)");
  }
  auto groups = source.settings();
  std::map<std::string, int64_t> numbers;
  for (auto& group : groups) {
    if (!numbered) break;
    group["param_names"] = group["params"];
    for (auto& param : group["params"]) {
      const auto number = std::ssize(numbers);
      numbers.emplace(param.get<std::string>(), number);
      param = number;
    }
  }
  PythonEntries entries;
  for (auto tensor : source.state()) {
    if (tensor.key.empty()) continue;  // state that PyTorch's optimizers don't keep
    tensor.dtype = RunSource::python_dtype(tensor);
    const auto number = numbers.find(tensor.parameter);
    if (numbered && number == numbers.end()) {
      throw UsageError(
          "the optimizer has state for '{}', but none of its groups has that parameter, so it has no number; convert to a layout of FSDP, "
          "which needs no numbers",
          tensor.parameter);
    }
    auto parameter = numbered ? DcpPath::value_type(number->second) : tensor.parameter;
    entries.push_back({{"optimizer", "state", std::move(parameter), tensor.key}, tensor});
  }
  if (entries.empty()) entries.push_back({{"optimizer", "state"}});
  int64_t number = 0;
  for (const auto& group : groups) {
    if (group.empty()) entries.push_back({{"optimizer", "param_groups", number}});
    for (const auto& [key, value] : group.items()) entries.push_back({{"optimizer", "param_groups", number, key}, from_json(value)});
    number++;
  }
  return entries;
}

PythonEntries python_run(const RunSource& source) {
  auto entries = python_model(source);
  if (!source.run().optimizer.empty()) std::ranges::move(python_optimizer(source), std::back_inserter(entries));
  if (source.options().weights_only) return entries;
  for (const auto& tensor : source.beside()) entries.push_back({{tensor.key}, tensor});
  for (const auto& [name, text] : source.notes()) {
    if (name == kSettingsNote) continue;
    const auto begin = name.substr(0, name.find('.'));
    if (begin == "model" || begin == "optimizer")
      throw UsageError("the note '{}' would be taken for a part of the {}; give it another name", name, begin);
    entries.push_back({{name}, from_json(value_of_note(text))});
  }
  return entries;
}

at::Tensor generator_of(const RunSource& source, int rank) {
  const auto generator = read_generator(source.stored(), source.run(), rank);
  return generator ? generator->get_state() : at::Tensor();
}

}  // namespace tessera::checkpoint
