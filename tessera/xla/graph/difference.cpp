#include "tessera/xla/graph/difference.h"

#include <fmt/format.h>

#include <algorithm>

namespace tessera::xla {
namespace {

std::vector<std::string_view> lines_of(std::string_view text) {
  std::vector<std::string_view> lines;
  while (!text.empty()) {
    const auto end = std::min(text.find('\n'), text.size() - 1);
    lines.push_back(text.substr(0, end));
    text.remove_prefix(end + 1);
  }
  return lines;
}

/// Returns the part of `text` between the first `begin` and the next `end`.
std::string_view between(std::string_view text, std::string_view begin, std::string_view end) {
  const auto from = text.find(begin);
  if (from == std::string_view::npos) return {};
  text.remove_prefix(from + begin.size());
  return text.substr(0, text.find(end));
}

/// The most texts to keep for one step, those of its newest programs: the text of a large program takes much memory.
constexpr size_t kKeptTexts = 8;
/// The most steps to remember: those with the newest programs.
constexpr size_t kKeptSteps = 16;
/// If a step has had more runs than this for each of its programs, no difference is reported: it just has another batch size now and then.
constexpr int64_t kFewRuns = 20;

constexpr std::string_view kFunction = "  func.func", kOperation = "    %v", kNumbers = "    %";

std::string_view name_in(std::string_view line) {
  const auto name = between(line, "= \"", "\"");
  return name.substr(name.find('.') + 1);
}
std::string_view types_in(std::string_view line) {
  const auto colon = line.rfind(" : ");
  return colon == std::string_view::npos ? std::string_view() : line.substr(colon + 3);
}

/// Returns the arguments, with their aliasing attributes, in the line that declares the function.
std::vector<std::string_view> arguments_in(std::string_view line) {
  std::vector<std::string_view> arguments;
  auto list = between(line, "(", ") -> (");
  while (!list.empty()) {
    const auto end = std::min(list.find(", %"), list.size());
    arguments.push_back(list.substr(0, end));
    list.remove_prefix(std::min(end + 2, list.size()));
  }
  return arguments;
}

/// `line`: how many lines of operations there are, all of them equal.
Difference between_functions(size_t line, std::string_view now, std::string_view before) {
  const auto ours = arguments_in(now), theirs = arguments_in(before);
  const auto [a, b] = std::ranges::mismatch(ours, theirs);
  const auto number = a - ours.begin();
  const auto shown = [](const auto& place, const auto& list) { return place == list.end() ? "missing" : std::string(*place); };
  return {line, fmt::format("argument {}", number),
          fmt::format("in argument {}, which is {} and was {}", number, shown(a, ours), shown(b, theirs))};
}

}  // namespace

Difference first_difference(std::string_view now, std::string_view before) {
  // Compares arguments only if all operations are equal: where an operation differs, argument types often differ, too, but explain less.
  std::string_view functions[2], operation;
  const auto next = [&](std::vector<std::string_view>::const_iterator& line, const std::vector<std::string_view>& all,
                        std::string_view& function) {
    for (; line != all.end(); line++) {
      if (line->starts_with(kFunction)) {
        function = *line;
      } else if (!line->starts_with(kNumbers) || line->starts_with(kOperation)) {
        return *line;
      }
    }
    return std::string_view();
  };
  const auto ours = lines_of(now), theirs = lines_of(before);
  auto a = ours.begin(), b = theirs.begin();
  for (size_t number = 0;; number++) {
    const auto here = next(a, ours, functions[0]), there = next(b, theirs, functions[1]);
    if (here.empty() && there.empty()) return between_functions(number, functions[0], functions[1]);
    if (here.starts_with(kOperation)) operation = here;
    if (here == there) {
      a++;
      b++;
      continue;
    }
    const auto place = between(operation, kOperation, " =");
    const auto describe = [&](const char* what, auto is, auto was) {
      return Difference{number, fmt::format("{} of {}", what, place),
                        fmt::format("in operation {}, {}: its {} {}, which {}", place, name_in(operation), what, is, was)};
    };
    if (here.empty() || there.empty() || !there.starts_with(kOperation) != !here.starts_with(kOperation) ||
        name_in(here) != name_in(there)) {
      const auto shown = [](std::string_view line) { return line.starts_with(kOperation) ? name_in(line) : std::string_view("the end"); };
      return {number, fmt::format("operation {}", place),
              fmt::format("in operation {}, which is {} and was {}", place, shown(here), shown(there))};
    }
    if (types_in(here) != types_in(there)) return describe("types are", types_in(here), fmt::format("were {}", types_in(there)));
    const auto ours_has = between(here, "<{", "}>"), theirs_has = between(there, "<{", "}>");
    if (ours_has != theirs_has) return describe("attributes are", ours_has, fmt::format("were {}", theirs_has));
    return describe("operands are", between(here, "\"(", ")"), fmt::format("were {}", between(there, "\"(", ")")));
  }
}

std::optional<std::string> StepHistory::add(size_t program, const std::string& text) {
  auto& step = steps_[fmt::format("{} {}", arguments_in(between(text, "func.func", "\n")).size(), between(text, ") -> (", ") {"))];
  of_program_[program] = &step;
  step.runs++;
  // The same text was added before if its program was dropped and is compiled again.
  if (std::ranges::any_of(step.texts, [&](const auto& other) { return other.second == text; })) return std::nullopt;
  step.programs++;
  std::optional<Difference> smallest;
  for (const auto& [number, other] : step.texts) {
    auto difference = first_difference(text, other);
    if (!smallest || difference.line > smallest->line) smallest = std::move(difference);
  }
  step.texts.emplace(program, text);
  if (step.texts.size() > kKeptTexts) step.texts.erase(step.texts.begin());
  if (steps_.size() > kKeptSteps) {
    const auto oldest = std::ranges::min_element(steps_, {}, [](const auto& known) { return known.second.texts.rbegin()->first; });
    std::erase_if(of_program_, [&](const auto& known) { return known.second == &oldest->second; });
    steps_.erase(oldest);
  }
  if (step.programs < 3 || step.runs > kFewRuns * step.programs || !told_.insert(smallest->where).second) return std::nullopt;
  return fmt::format("a step needs yet another program, its number {}. It first differs from the most similar earlier one {}", step.programs, smallest->text);
}

void StepHistory::replace(size_t program, size_t other, const std::string& text) {
  const auto found = of_program_.find(other);
  if (found == of_program_.end()) return;
  of_program_[program] = found->second;
  if (found->second->texts.erase(other)) found->second->texts.emplace(program, text);
  ran(program);
}

void StepHistory::ran(size_t program) {
  if (const auto found = of_program_.find(program); found != of_program_.end()) found->second->runs++;
}

}  // namespace tessera::xla
