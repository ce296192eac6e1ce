#include "tessera/train/progress_line.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "tessera/base/words.h"

namespace tessera::train {
namespace {

// Columns of a bar, including both edges. Details that are needed least are left out to make room for a bar of kUsefulBar.
constexpr int kShortestBar = 6, kUsefulBar = 9, kLongestBar = 40;
constexpr int kEighths = 8;
constexpr std::array<std::string_view, kEighths> kBlocks = {" ", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};

/// A character of UTF-8 text and its width in columns. East Asian characters take two columns; this is an approximation by their first
/// byte, and only titles can contain them.
struct Character {
  std::string_view text;
  int columns;

  static Character first_of(std::string_view text) {
    const auto lead = static_cast<unsigned char>(text.front());
    const size_t bytes = lead < 0xc0 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
    return {.text = text.substr(0, bytes), .columns = lead >= 0xe1 && lead != 0xe2 ? 2 : 1};
  }
};

int columns_of(std::string_view text) {
  int result = 0;
  while (!text.empty()) {
    const auto next = Character::first_of(text);
    result += next.columns;
    text.remove_prefix(next.text.size());
  }
  return result;
}

/// Returns the beginning of the text that fits into the columns, with control characters replaced by spaces.
std::string truncated(std::string_view text, int columns) {
  std::string result;
  while (!text.empty()) {
    const auto next = Character::first_of(text);
    columns -= next.columns;
    if (columns < 0) break;
    const auto lead = static_cast<unsigned char>(next.text.front());
    result += lead < ' ' || lead == 0x7f ? " " : next.text;
    text.remove_prefix(next.text.size());
  }
  return result;
}

double share(const ProgressState& state) {
  return std::clamp(static_cast<double>(state.step) / static_cast<double>(state.steps), 0.0, 1.0);
}

std::string value_text(const Value& shown) {
  const double value = shown.value;
  if (shown.unit == Unit::Bytes) return std::isfinite(value) ? size_text(value) : "unknown";
  if (shown.unit == Unit::Part) return fmt::format("{:.{}f} %", 100 * value, value < 0.0995 ? 1 : 0);
  const double size = std::abs(value);
  if (size != 0 && (size < 0.01 || size >= 1e7)) return fmt::format("{:.3g}", value);
  return size < 1000 ? fmt::format("{:.3f}", value) : fmt::format("{:.0f}", value);
}

std::string count(const ProgressState& state) {
  return state.steps > 0 ? fmt::format("{}/{}", state.step, state.steps) : std::to_string(state.step);
}

/// An item after the count of steps. If not all items fit, other values are left out first, then rate and time, and the first value last.
struct Detail {
  enum class Need { First, Then, AtLast } need;
  std::string text;
};

/// Returns the details in the order in which they are shown.
std::vector<Detail> details(const ProgressState& state) {
  std::vector<Detail> result;
  for (const auto& value : state.values) {
    const auto text = value.unit == Unit::Part ? value_text(value) + " " + upper(value.name) : value.name + " " + value_text(value);
    result.push_back({result.empty() ? Detail::Need::First : Detail::Need::AtLast, text});
  }
  if (state.rate) result.push_back({Detail::Need::Then, fmt::format("{} {}/s", short_number(*state.rate), state.unit)});
  if (state.took) {
    result.push_back({Detail::Need::Then, "in " + short_time(*state.took)});
  } else if (state.left) {
    result.push_back({Detail::Need::Then, short_time(*state.left) + " left"});
  }
  return result;
}

/// Returns the details that fit into the columns with a gap before each. If a detail does not fit, details that are needed less are left
/// out, too. Keeps columns for a bar before adding details of Need::AtLast.
std::vector<std::string> fitting(const std::vector<Detail>& all, int columns, int gap, int for_bar) {
  std::vector<bool> fits(all.size());
  bool is_room = true;
  for (const auto need : {Detail::Need::First, Detail::Need::Then, Detail::Need::AtLast}) {
    if (need == Detail::Need::AtLast) columns -= for_bar;
    for (size_t i = 0; i < all.size(); i++) {
      if (all[i].need != need) continue;
      const int columns_needed = gap + columns_of(all[i].text);
      is_room = is_room && columns_needed <= columns;
      if (!is_room) break;
      fits[i] = true;
      columns -= columns_needed;
    }
  }
  std::vector<std::string> result;
  for (size_t i = 0; i < all.size(); i++) {
    if (fits[i]) result.push_back(all[i].text);
  }
  return result;
}

}  // namespace

std::string share_bar(double share, int columns, Glyphs glyphs) {
  const int inside = columns - 2;
  std::string result = glyphs == Glyphs::Blocks ? "▕" : "[";
  if (glyphs == Glyphs::Blocks) {
    const int eighths = static_cast<int>(share * inside * kEighths);
    for (int i = 0; i < inside; i++) {
      const int here = eighths - i * kEighths;
      result += here >= kEighths ? "█" : kBlocks[static_cast<size_t>(std::max(here, 0))];
    }
    return result + "▏";
  }
  const auto full = static_cast<size_t>(share * inside);
  return result + std::string(full, '#') + std::string(static_cast<size_t>(inside) - full, ' ') + "]";
}

std::string render_bar(const ProgressState& state, int columns, Glyphs glyphs) {
  auto begin = truncated(state.title, columns);
  std::string end;
  int free = columns - columns_of(begin);
  const auto add = [&](std::string& to, const std::string& item, std::string_view gap) {
    const int needed = columns_of(item) + (free < columns ? static_cast<int>(gap.size()) : 0);
    if (needed > free) return false;
    if (free < columns) to += gap;
    to += item;
    free -= needed;
    return true;
  };

  bool fits = true;
  // Rounded down, so that 100% means all steps.
  if (state.steps > 0) fits = add(begin, fmt::format("{:3}%", static_cast<int>(share(state) * 100)), begin.empty() ? "" : " ");
  // Padded to its final width, so that the length of the bar does not change.
  const auto counted = count(state);
  const auto widest = state.steps > 0 ? 2 * std::to_string(state.steps).size() + 1 : 0;
  fits = fits && add(end, fmt::format("{:>{}}", counted, widest), state.steps > 0 ? " " : "  ");
  constexpr std::string_view kGap = "  ";
  const auto all = details(state);
  const int for_bar = state.steps > 0 ? 1 + kUsefulBar : 0;
  const auto shown = fits ? fitting(all, free, static_cast<int>(kGap.size()), for_bar) : std::vector<std::string>();
  for (const auto& detail : shown) add(end, detail, kGap);
  const int least = shown.size() == all.size() ? kShortestBar : kUsefulBar;
  if (state.steps > 0 && fits && free > least) begin += " " + share_bar(share(state), std::min(free - 1, kLongestBar), glyphs);
  return begin + end;
}

std::string render_line(const ProgressState& state) {
  auto result = truncated(state.title, columns_of(state.title));
  result += (result.empty() ? "step " : " step ") + count(state);
  for (const auto& detail : details(state)) result += " " + detail.text;
  return result;
}

std::string short_number(double number) {
  constexpr std::array<std::string_view, 5> kUnits = {"", "k", "M", "G", "T"};
  size_t unit = 0;
  // 999.5 and more would be printed as 1000. The limits below are chosen by the same rule.
  while (number >= 999.5 && unit + 1 < kUnits.size()) {
    number /= 1000;
    unit++;
  }
  if (unit == 0 && number < 0.0995) return fmt::format("{:.1g}", number);
  return fmt::format("{:.{}f}{}", number, number < 0.995 ? 2 : number < 9.95 ? 1 : 0, kUnits[unit]);
}

std::string short_time(double seconds) {
  constexpr double kTooLong = 1e6 * 3600;
  if (!(seconds < kTooLong)) return "ages";
  const auto whole = static_cast<int64_t>(std::max(seconds, 0.0) + 0.5);
  if (whole < 3600) return fmt::format("{}:{:02}", whole / 60, whole % 60);
  return fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60);
}

}  // namespace tessera::train
