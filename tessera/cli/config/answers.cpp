// Answers that the user gives in advance, by --set or in a file.

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/cli/config/questions.h"
#include "tessera/config/yaml_tree.h"

namespace tessera::cli {
namespace {

using config::Origin;
using config::YamlValue;

void add_answers_of(GivenAnswers& answers, const YamlValue& map) {
  for (size_t i = 0; i < map.names.size(); i++) {
    const auto& value = map.values[i];
    if (value.shape == YamlValue::Shape::Map) {
      add_answers_of(answers, value);
      continue;
    }
    std::string text = value.text;
    for (const auto& part : value.values) text += (text.empty() ? "" : ",") + part.text;
    if (!value.is_empty())
      answers.insert_or_assign(std::string(config::todays_name(map.names[i])), config::Setting{text, Origin::Flag, value.where});
  }
}

}  // namespace

void add_given_answer(GivenAnswers& answers, const std::string& assignment) {
  const auto sign = assignment.find('=');
  if (sign == std::string::npos || sign == 0) {
    throw ConfigError("--set {}: write KEY=VALUE, such as mixed_precision=bf16", printable(assignment));
  }
  auto name = assignment.substr(0, sign);
  std::ranges::replace(name, '-', '_');
  answers.insert_or_assign(std::string(config::todays_name(name)),
                           config::Setting{assignment.substr(sign + 1), Origin::Flag, "--set " + printable(assignment)});
}

void read_given_answers(GivenAnswers& answers, const std::string& file) {
  const auto root = config::read_yaml(file);
  if (root.shape != YamlValue::Shape::Map) throw ConfigError("{} has no lines of KEY: VALUE", file);
  add_answers_of(answers, root);
}

void set_given(config::Settings& settings, const GivenAnswers& given) {
  for (const auto& [name, answer] : given) settings.set(name, answer.value, answer.origin, answer.where);
}

config::Settings default_settings(const GivenAnswers& given) {
  config::Settings settings;
  settings.set("use_cpu", "true", Origin::File, "tessera config default");
  settings.set("num_processes", "1", Origin::File, "tessera config default");
  settings.set("fsdp_version", "2", Origin::File, "tessera config default");
  set_given(settings, given);
  settings.expect_consistent();
  return settings;
}

}  // namespace tessera::cli
