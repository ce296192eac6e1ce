#include "tessera/cli/top_frame.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/base/middle.h"
#include "tessera/base/words.h"
#include "tessera/train/progress_line.h"

namespace tessera::cli::reports {
namespace {

constexpr double kSilent = 10;   // seconds without a line, if lines come more often
constexpr double kSlowFactor = 1.2;  // of the median: a rank that computes for longer is slow, if it waits less than half as much as most
constexpr int kCurveRows = 6, kLabelColumns = 10, kBarColumns = 8, kWideColumns = 100, kLeastRows = 9;
// Where the columns of the table end, before the last one, which has words; and how wide it is at least.
constexpr std::array kColumnEnds = {6, 15, 24, 39, 54, 63};
constexpr int kWordColumns = 15;

struct TopRow {
  int rank;
  RankLine line = {};  // the newest one, with the times of the newest one that has steps; steps are 0 if there is none
  double age = 0;      // seconds since the newest line
  std::pair<int, double> late = {};  // a greater one is worse
  std::string why = {};              // it is late; empty if it is not

  double share(double seconds) const { return line.seconds > 0 ? std::clamp(seconds / line.seconds, 0.0, 1.0) : 0; }
  double steps_per_second() const { return line.seconds > 0 ? static_cast<double>(line.steps) / line.seconds : 0; }
  double work() const { return line.per_step(line.work()); }
  double waits() const { return share(line.unshard + line.reduce); }
  bool is_silent() const { return age > std::max(kSilent, 3 * line.seconds); }
};

std::pair<double, double> middle_of_rows(const std::vector<TopRow>& rows, double (TopRow::*number)() const) {
  std::vector<double> values;
  for (const auto& row : rows) values.push_back((row.*number)());
  return middle_of(std::move(values));
}

std::vector<TopRow> top_rows_of(const RecordedRun& run, double now) {
  std::vector<TopRow> rows;
  for (int rank = 0; rank < run.world(); rank++) {
    TopRow row{.rank = rank};
    for (const auto& line : run.ranks[static_cast<size_t>(rank)].lines) {
      if (line.steps > 0) row.line = line;
      row.line.time = line.time;
      row.line.step = line.step;
      row.line.place = line.place;
    }
    row.age = std::max(0.0, now - run.facts.value("started", now) - row.line.time);
    rows.push_back(std::move(row));
  }
  return rows;
}

/// Finds the ranks that the others wait for.
void find_late(std::vector<TopRow>& rows) {
  const auto work = middle_of_rows(rows, &TopRow::work).first, usual_waits = middle_of_rows(rows, &TopRow::waits).second;
  const auto first = std::ranges::max_element(rows, {}, [](const TopRow& row) { return row.line.step; })->line;
  if (std::ranges::all_of(rows, &TopRow::is_silent)) return;  // the heading says so
  for (auto& row : rows) {
    // The lines of ranks are of different moments.
    const double later = std::max(0.0, first.time - row.line.time) * (first.seconds > 0 ? first.steps / first.seconds : 0);
    const double behind = static_cast<double>(first.step - row.line.step) - std::ceil(later);
    if (row.is_silent()) {
      row.late = {3, row.age};
      row.why = row.line.time > 0 ? fmt::format("last seen {} ago", train::short_time(row.age)) : "nothing seen yet";
    } else if (behind >= 2 && row.line.time > 0) {
      row.late = {2, behind};
      row.why = fmt::format("about {} steps behind", behind);
    } else if (row.work() > kSlowFactor * work && row.waits() < usual_waits / 2) {
      row.late = {1, row.work() / work};
      row.why = fmt::format("computes {:.1f}x as long as most", row.late.second);
    }
  }
}

/// A row of the table: two columns for a mark, and so on, as in the heading.
std::string row_text(const TopRow& row, const TopView& view) {
  auto text = fmt::format("{} {:>4}  ", row.why.empty() ? ' ' : '!', row.rank);
  if (row.line.time == 0) return text + row.why;
  text += fmt::format("{:>7}  ", row.line.step);
  if (!row.why.empty() && view.columns < kColumnEnds.back() + kWordColumns) return text + row.why;
  text += fmt::format("{:>7}  ", train::short_number(row.steps_per_second()));
  for (const auto part : {row.share(row.line.compute), row.waits()}) {
    text += fmt::format("{} {:>3.0f}%  ", train::share_bar(part, kBarColumns, view.glyphs), 100 * part);
  }
  const auto memory = row.line.memory.find("process");
  // In a narrow terminal a row has room for either.
  if (row.why.empty() || view.columns >= kWideColumns) {
    text += fmt::format("{:>7}  ", memory != row.line.memory.end() ? size_text(memory->second) : "");
  }
  if (view.columns >= kWideColumns) text += fmt::format("{:>5}  ", train::short_time(row.age));
  return text + row.why + (row.why.empty() || row.line.place.empty() ? "" : "; ") + printable(row.line.place);
}

/// How many columns of the table are shown, so that no number is cut.
int whole_columns(int columns) {
  if (columns >= kColumnEnds.back() + kWordColumns) return columns;
  const auto next = std::ranges::upper_bound(kColumnEnds, columns);
  return next == kColumnEnds.begin() ? columns : *(next - 1);
}

/// Rows of blocks under the values, with the largest and the smallest value beside them.
std::vector<std::string> curve_rows(std::vector<double> values, const TopView& view) {
  std::erase_if(values, [](double value) { return !std::isfinite(value); });
  const auto columns = static_cast<size_t>(std::max(view.columns - kLabelColumns, 1));
  std::vector<double> means;
  for (size_t i = 0; i < columns && !values.empty(); i++) {
    const auto begin = i * values.size() / columns, end = std::max(begin + 1, (i + 1) * values.size() / columns);
    const double sum = std::accumulate(&values[begin], values.data() + end, 0.0);
    means.push_back(sum / static_cast<double>(end - begin));
  }
  if (means.empty()) return {};
  const auto [least, most] = std::ranges::minmax(means);
  constexpr std::array<std::string_view, 9> kBlocksUp = {" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  constexpr std::string_view kAscii = " ...:::##";
  std::vector<std::string> rows;
  for (int row = 0; row < kCurveRows; row++) {
    const auto label = row == 0 ? fmt::format("{:.4g}", most) : row == kCurveRows - 1 ? fmt::format("{:.4g}", least) : "";
    auto text = fmt::format("{:>{}}  ", label, kLabelColumns - 2);
    for (const double mean : means) {
      const int level = most > least ? 1 + static_cast<int>((mean - least) / (most - least) * (8 * kCurveRows - 1)) : 4 * kCurveRows;
      const auto eighths = static_cast<size_t>(std::clamp(level - 8 * (kCurveRows - 1 - row), 0, 8));
      text += view.glyphs == train::Glyphs::Blocks ? kBlocksUp[eighths] : kAscii.substr(eighths, 1);
    }
    rows.push_back(std::move(text));
  }
  return rows;
}

/// "llama  4 ranks  shm  step 1200  0:20:14  running"
std::string top_heading(const RecordedRun& run, const std::vector<TopRow>& rows, double now) {
  const auto ended = run.facts.value("ended", nlohmann::json());
  const auto step = std::ranges::max(rows, {}, [](const TopRow& row) { return row.line.step; }).line.step;
  const auto age = std::ranges::min(rows, {}, &TopRow::age).age;
  const auto text = fmt::format("{}  {}  {}  step {}  {}  ", printable(run.facts.value("program", "")), counted(run.world(), "rank"),
                                printable(run.facts.value("engine", "")), step,
                                train::short_time((ended.is_number() ? ended.get<double>() : now) - run.facts.value("started", now)));
  if (const auto status = run.facts.value("status", ""); status != "runs") {
    const auto cause = printable(run.facts.value("cause", ""));
    return text + printable(status) + (cause.empty() ? "" : ": ") + cause;
  }
  return text + (std::ranges::all_of(rows, &TopRow::is_silent) ? fmt::format("no rank seen for {}", train::short_time(age)) : "running");
}

/// The newest numbers that have room: "loss 0.412  lr 0.01  41 % MFU  9.8k samples/s"
std::string newest_numbers(const RecordedRun& run, int columns) {
  std::vector<std::string> numbers;
  for (const auto& [name, curve] : run.metrics) {
    if (curve.empty() || name == "memory") continue;
    const auto value = curve.back().second;
    numbers.insert(name == "loss" ? numbers.begin() : numbers.end(),
                   name == "samples_per_second" ? train::short_number(value) + " samples/s"
                   : name == "mfu"              ? fmt::format("{:.2g} % MFU", 100 * value)
                                                : fmt::format("{} {:.4g}", printable(name), value));
  }
  std::string text;
  for (const auto& number : numbers) {
    if (std::ssize(text) + 2 + std::ssize(number) <= columns) text += (text.empty() ? "" : "  ") + number;
  }
  return text;
}

}  // namespace

std::string top_frame(const RecordedRun& run, double now, const TopView& view) {
  auto rows = top_rows_of(run, now);
  if (run.facts.value("status", "") == "runs") find_late(rows);
  std::vector<std::string> lines = {top_heading(run, rows, now)};
  if (view.rows >= kLeastRows) lines.insert(lines.end(), {newest_numbers(run, view.columns), ""});
  auto metric = run.metrics.find("loss");
  if (metric == run.metrics.end()) metric = run.metrics.begin();
  if (metric != run.metrics.end() && !metric->second.empty() && view.rows > 3 * kCurveRows) {
    const auto& [name, curve] = *metric;
    std::vector<double> values;
    for (const auto& [step, value] : curve) values.push_back(value);
    for (auto& line : curve_rows(std::move(values), view)) lines.push_back(std::move(line));
    lines.push_back(fmt::format("{:{}}{}, steps {} to {}", "", kLabelColumns, printable(name), curve.front().first, curve.back().first));
    lines.emplace_back();
  }
  const auto put_row = [&](const std::string& text, int columns) { lines.push_back(fmt::format("{:.{}}", text, columns)); };
  const int whole = whole_columns(view.columns);
  put_row(fmt::format("  rank     step  steps/s  compute        waits           memory  {}where",
                      view.columns >= kWideColumns ? " seen  " : ""),
          whole);

  // A line stays free for the cursor.
  const auto room = static_cast<size_t>(std::max<int>(view.rows - 1 - static_cast<int>(lines.size()), 2));
  const bool fits = rows.size() <= room;
  if (!fits) {
    std::ranges::stable_sort(rows, std::ranges::greater(), [](const TopRow& row) { return std::pair(row.late, row.work()); });
  }
  for (size_t i = 0; i < (fits ? rows.size() : room - 1); i++)
    put_row(row_text(rows[i], view), rows[i].why.empty() ? whole : view.columns);
  if (!fits) lines.push_back(fmt::format("  ... and {} more", rows.size() - (room - 1)));
  lines.resize(std::min(lines.size(), static_cast<size_t>(std::max(view.rows - 1, 1))));
  std::string frame;
  for (const auto& line : lines) {
    const auto shown = fmt::format("{:.{}}", line, view.columns);
    frame += shown.substr(0, shown.find_last_not_of(' ') + 1) + "\n";
  }
  return frame;
}

}  // namespace tessera::cli::reports
