#include "tessera/checkpoint/convert/python_run.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/checkpoint/live/generator_state.h"
#include "tessera/checkpoint/stored/runs.h"

namespace tessera::checkpoint {
using nlohmann::json;

std::vector<std::pair<std::string, const SourceTensor*>> named_model(const RunSource& source) {
  std::vector<std::pair<std::string, const SourceTensor*>> result;
  for (const auto& tensor : source.model()) result.emplace_back(tensor.name, &tensor);
  for (const auto& [alias, name] : source.run().catalog.aliases) {
    const auto first = std::ranges::find(source.model(), name, &SourceTensor::name);
    if (first != source.model().end()) result.emplace_back(alias, &*first);
  }
  return result;
}

std::vector<SourceTensor> python_state(const RunSource& source) {
  std::vector<SourceTensor> result;
  for (auto tensor : source.state()) {
    if (tensor.key.empty()) continue;
    tensor.dtype = RunSource::python_dtype(tensor);
    result.push_back(tensor);
  }
  return result;
}

std::map<std::string, json> values_of_notes(const RunSource& source) {
  std::map<std::string, json> result;
  for (const auto& [name, text] : source.notes()) {
    if (name == kSettingsNote) continue;
    const auto begin = name.substr(0, name.find('.'));
    if (begin == "model" || begin == "optimizer")
      throw UsageError("the note '{}' would be taken for a part of the {}; give it another name", name, begin);
    result[name] = value_of_note(text);
  }
  return result;
}

at::Tensor generator_of(const RunSource& source, int rank) {
  const auto generator = read_generator(source.stored(), source.run(), rank);
  return generator ? generator->get_state() : at::Tensor();
}

}  // namespace tessera::checkpoint
