#include "tessera/cli/config/prompt.h"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <optional>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/cli/config/raw_terminal.h"
#include "tessera/config/value.h"

namespace tessera::cli {
namespace {

void show(const std::string& text) {
  std::fputs(text.c_str(), stdout);
  std::fflush(stdout);
}

ConfigError input_ended(const Question& question) {
  return ConfigError(
      "the input ended at the question '{}'; answer it in advance with --set {}=VALUE, or take all defaults with "
      "tessera config default",
      question.text, question.name);
}

/// Reads a line byte by byte, so that input after the line stays for the next question.
std::optional<std::string> read_line() {
  std::string line;
  for (;;) {
    char letter = 0;
    const auto count = ::read(STDIN_FILENO, &letter, 1);
    if (count < 0 && errno == EINTR) continue;
    if (count != 1) return std::nullopt;  // the input ended within a line, which may be incomplete
    if (letter == '\n') break;
    line += letter;
  }
  const auto first = line.find_first_not_of(" \t\r"), last = line.find_last_not_of(" \t\r");
  return first == std::string::npos ? std::string() : line.substr(first, last - first + 1);
}

size_t default_place(const Question& question) {
  const auto found = std::ranges::find(question.choices, question.otherwise, &Choice::value);
  return found == question.choices.end() ? 0 : static_cast<size_t>(found - question.choices.begin());
}

/// Returns a hint that shows the default, such as " [yes/NO]" or " [1]".
std::string default_hint(const Question& question) {
  if (question.otherwise == "yes") return " [YES/no]";
  if (question.otherwise == "no") return " [yes/NO]";
  return question.otherwise.empty() ? "" : fmt::format(" [{}]", question.otherwise);
}

std::string ask_line(const Question& question) {
  show(fmt::format("{}{}: ", question.text, default_hint(question)));
  const auto line = read_line();
  if (!line) {
    show("\n");
    throw input_ended(question);
  }
  return *line;
}

/// Returns the value of the choice whose number, counted from 1, is the text; returns the text itself if it is not the number of a choice.
std::string value_at(const Question& question, const std::string& text) {
  const auto number = config::to_integer(text).value_or(0);
  if (number < 1 || number > std::ssize(question.choices)) return text;
  return question.choices[static_cast<size_t>(number - 1)].value;
}

std::string ask_number(const Question& question) {
  std::string menu = question.text + "\n";
  for (size_t i = 0; i < question.choices.size(); i++) menu += fmt::format("  {}. {}\n", i + 1, question.choices[i].label);
  show(menu);
  const Question number{.name = question.name, .text = "Your choice", .otherwise = fmt::format("{}", default_place(question) + 1)};
  try {
    return value_at(question, ask_line(number));
  } catch (const ConfigError&) {
    throw input_ended(question);
  }
}

std::string menu_lines(const Question& question, size_t place) {
  std::string text;
  for (size_t i = 0; i < question.choices.size(); i++) {
    const auto line = fmt::format("{} {}. {}", i == place ? ">" : " ", i + 1, question.choices[i].label);
    text += i == place ? fmt::format("\x1b[K\x1b[1m{}\x1b[0m\n", line) : fmt::format("\x1b[K{}\n", line);
  }
  return text;
}

/// Returns the place in the menu to which a key moves.
size_t moved(size_t place, size_t places, char key) {
  if (key == RawTerminal::kUp) return (place + places - 1) % places;
  if (key == RawTerminal::kDown) return (place + 1) % places;
  const auto number = static_cast<size_t>(key - '0');
  return key > '0' && key <= '9' && number <= places ? number - 1 : place;
}

/// Moves `place` by keys until a key ends the menu, and returns that key; nothing if the input ended.
std::optional<char> move_in_menu(const Question& question, size_t& place) {
  const RawTerminal terminal;
  const auto up = fmt::format("\x1b[{}A", question.choices.size());
  show("\x1b[?25l" + menu_lines(question, place));
  for (;;) {
    const auto key = terminal.read_key();
    if (!key || *key == RawTerminal::kInterrupt) return key;
    if (*key == RawTerminal::kEnter) break;
    place = moved(place, question.choices.size(), *key);
    show(up + menu_lines(question, place));
  }
  show(up + "\x1b[J");  // ask_menu() shows the answer after the question instead
  return RawTerminal::kEnter;
}

std::string ask_menu(const Question& question) {
  show(fmt::format("{} (arrow keys or numbers, then Enter)\n", question.text));
  auto place = default_place(question);
  const auto end = move_in_menu(question, place);
  if (!end) throw input_ended(question);
  if (*end == RawTerminal::kInterrupt) ::raise(SIGINT);  // raised after RawTerminal has restored the terminal
  const auto* const colon = question.text.ends_with('?') ? "" : ":";
  show(fmt::format("\x1b[1A\x1b[K{}{} {}\n", question.text, colon, question.choices[place].label));
  return question.choices[place].value;
}

bool is_real_terminal() {
  return ::isatty(STDIN_FILENO) == 1 && ::isatty(STDOUT_FILENO) == 1;
}

}  // namespace

std::string ask_user(const Question& question, const std::string& complaint) {
  if (!complaint.empty()) show(fmt::format("  {}\n", complaint));
  if (question.choices.empty()) return ask_line(question);
  return is_real_terminal() ? ask_menu(question) : ask_number(question);
}

}  // namespace tessera::cli
