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
  std::string name;                  // by which an answer can be given in advance; mostly that of a key
  std::string text;                  // "How many machines take part?"
  std::vector<Choice> choices = {};  // of a menu; a free answer without
  std::string otherwise = {};        // what an empty answer means; without it an answer is required
};

/// Asks once; `complaint` says what is wrong with the last answer to the same question, and is empty at first.
using Ask = std::function<std::string(const Question& question, const std::string& complaint)>;

/// Answers that were given before the questions, by their names.
using GivenAnswers = std::map<std::string, config::Setting, std::less<>>;

/// "k=v" of --set.
void add_given_answer(GivenAnswers& answers, const std::string& assignment);
/// Reads a YAML file of names and values. Sections make no difference.
void read_given_answers(GivenAnswers& answers, const std::string& file);

/// Whether an answer of this name is about no key, such as use_deepspeed.
bool is_question(std::string_view name);

/// Asks what is not answered yet, in the order of `accelerate config`. Throws ConfigError for a given answer that is invalid.
config::Settings interview(const Ask& ask, GivenAnswers given);

/// The settings of `tessera config default`: one rank, and more would share one model. Given answers change it.
config::Settings default_settings(const GivenAnswers& given);

/// Given answers as settings. Throws ConfigError for names of no key.
void set_given(config::Settings& settings, const GivenAnswers& given);

}  // namespace tessera::cli
