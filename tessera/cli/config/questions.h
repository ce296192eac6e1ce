// The questions of `tessera config`, and what their answers mean. The caller decides how they are asked.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/config/settings.h"

namespace tessera::cli {

struct Choice {
  std::string value, label;
};

struct Question {
  std::string name;                  // by which an answer can be given in advance; mostly the name of a key
  std::string text;                  // "How many machines take part?"
  std::vector<Choice> choices = {};  // the choices of a menu; if empty, the answer is any text
  std::string otherwise = {};        // the value of an empty answer; if empty, an answer is required
};

/// Asks a question once. `complaint` says what is wrong with the last answer to the same question, and is empty at first.
using Ask = std::function<std::string(const Question& question, const std::string& complaint)>;

/// Answers that were given in advance, by the names of their questions.
using GivenAnswers = std::map<std::string, config::Setting, std::less<>>;

/// Adds the answer of --set: "KEY=VALUE".
void add_given_answer(GivenAnswers& answers, const std::string& assignment);
/// Adds the answers in a YAML file of names and values. Names in sections count like names at the top of the file.
void read_given_answers(GivenAnswers& answers, const std::string& file);

/// Whether this is the name of a question that belongs to no key, such as use_deepspeed.
bool is_question(std::string_view name);

/// Asks the questions that `given` does not answer, in the order of `accelerate config`, and returns the settings. Throws ConfigError for a
/// given answer that is invalid.
config::Settings interview(const Ask& ask, GivenAnswers given);

/// Returns the settings of `tessera config default`: one rank on the CPU, with FSDP, so that more ranks would share one model. Given
/// answers win over these settings.
config::Settings default_settings(const GivenAnswers& given);

/// Sets the keys to the given answers. Throws ConfigError for a name that is not a key.
void set_given(config::Settings& settings, const GivenAnswers& given);

}  // namespace tessera::cli
