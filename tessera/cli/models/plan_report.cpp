#include "tessera/cli/models/plan_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <tuple>

#include "tessera/base/table.h"
#include "tessera/base/words.h"
#include "tessera/train/progress_line.h"

namespace tessera::cli {
namespace {

using train::short_bytes, train::short_number;

constexpr size_t kBars = 6;
constexpr int kNarrowestBar = 10;
// What a bar is drawn with, for each kind of memory in the order of the outcome.
constexpr std::array<const char*, 6> kBlocks = {"█", "▓", "▒", "░", "▚", "·"};
constexpr std::array<const char*, 6> kLetters = {"#", "=", "+", "-", "o", "."};
constexpr std::array<int, 6> kColours = {34, 36, 32, 33, 31, 35};

std::string plan_seconds(double seconds) {
  if (seconds < 1e-3) return fmt::format("{:.0f} us", seconds * 1e6);
  return seconds < 1 ? fmt::format("{:.3g} ms", seconds * 1e3) : fmt::format("{:.3g} s", seconds);
}

double time_of(const Plan& plan, const char* what) {
  return plan.outcome.at("time").at(what);
}

const nlohmann::ordered_json& kinds_of(const Plan& plan) {
  return plan.outcome.at("memory").at("kinds");
}

std::string filled(size_t kind, int times, const ChartStyle& style) {
  std::string text;
  for (int i = 0; i < times; i++) text += (style.glyphs == train::Glyphs::Blocks ? kBlocks : kLetters)[kind % kBlocks.size()];
  if (style.colours == ChartStyle::Colours::No || times == 0) return text;
  return fmt::format("\033[{}m{}\033[0m", kColours[kind % kColours.size()], text);
}

std::string quoted_word(const std::string& word) {
  constexpr auto kPlain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=./:,@%";
  if (!word.empty() && word.find_first_not_of(kPlain) == std::string::npos) return word;
  std::string text = "'";
  for (const char c : word) text += c == '\'' ? "'\\''" : std::string(1, c);
  return text + "'";
}

}  // namespace

void sort_plans(std::vector<Plan>& plans) {
  std::ranges::stable_sort(plans, {}, [](const Plan& plan) {
    const auto each = std::max<int64_t>(plan.tokens, 1) * plan.world;
    return std::tuple(!plan.fits(), plan.seconds() / static_cast<double>(each));
  });
}

std::string plan_tables(const std::vector<Plan>& plans) {
  std::vector<std::array<std::string, 10>> steps = {
      {"", "ranks", "memory", "fits", "step", "tokens/s", "computes", "sends", "moving", "waits"}};
  std::vector<std::array<std::string, 9>> kinds = {{"memory of a rank", "ranks"}};
  const auto& first = kinds_of(plans.front());
  size_t column = 2;
  for (const auto& [name, bytes] : first.items()) {
    if (column < kinds[0].size()) kinds[0][column++] = name;
  }
  kinds[0][8] = "most in";
  for (const auto& plan : plans) {
    const auto& traffic = plan.outcome.at("traffic");
    const auto sends = traffic.at("gathered").get<double>() + traffic.at("reduced").get<double>();
    steps.push_back({plan.name, std::to_string(plan.world), short_bytes(plan.peak()),
                     plan.memory == 0 ? "?" : plan.fits() ? "yes" : "no", plan_seconds(plan.seconds()),
                     plan.tokens == 0 ? "" : short_number(plan.tokens_per_second()),
                     plan_seconds(time_of(plan, "compute") + time_of(plan, "optimizer")), short_bytes(sends),
                     plan_seconds(time_of(plan, "communication")), plan_seconds(time_of(plan, "exposed"))});
    auto& row = kinds.emplace_back(std::array<std::string, 9>{plan.name, std::to_string(plan.world)});
    column = 2;
    for (const auto& [name, bytes] : kinds_of(plan).items()) {
      if (column < 8) row[column++] = short_bytes(bytes.get<double>());
    }
    row[8] = printable(plan.outcome.at("memory").at("where").get<std::string>());
  }
  return table_of(steps, "<>>>>>>>>>") + "\n" + table_of(kinds, "<>>>>>>><");
}

std::string plan_chart(const std::vector<Plan>& plans, const ChartStyle& style) {
  const auto count = std::min(plans.size(), kBars);
  size_t widest = 0;
  double most = 0;
  std::vector<std::string> names;
  for (size_t i = 0; i < count; i++) {
    names.push_back(fmt::format("{}, {}", plans[i].name, counted(plans[i].world, "rank")));
    widest = std::max(widest, names.back().size());
    most = std::max(most, plans[i].peak());
  }
  constexpr int kPeak = 9;  // "  1.2 GB " behind a bar
  const int width = style.columns - static_cast<int>(widest) - 2 - kPeak;
  if (width < kNarrowestBar || most == 0) return {};
  std::string text;
  for (size_t i = 0; i < count; i++) {
    text += names[i] + std::string(widest - names[i].size() + 2, ' ');
    double sum = 0;
    int drawn = 0;
    size_t kind = 0;
    for (const auto& [name, bytes] : kinds_of(plans[i]).items()) {
      sum += bytes.get<double>();
      const int end = static_cast<int>(std::lround(sum / most * width));
      text += filled(kind++, end - drawn, style);
      drawn = end;
    }
    text += "  " + short_bytes(plans[i].peak()) + "\n";
  }
  std::string legend;
  int columns = 0;
  size_t kind = 0;
  for (const auto& [name, bytes] : kinds_of(plans.front()).items()) {
    const int needed = static_cast<int>(name.size()) + 4;
    if (columns > 0 && columns + needed > style.columns) {
      legend += "\n";
      columns = 0;
    }
    legend += (columns > 0 ? "  " : "") + filled(kind++, 1, style) + " " + name;
    columns += needed;
  }
  return text + legend + "\n";
}

std::string launch_line(const Plan& plan, const std::string& program) {
  const int hosts = (plan.world + plan.ranks_per_host - 1) / plan.ranks_per_host;
  auto line = fmt::format("tessera launch -n {}", hosts > 1 ? plan.ranks_per_host : plan.world);
  if (hosts > 1) line += fmt::format(" --nnodes {} --node-rank 0 --rdzv-endpoint node0:29500", hosts);
  for (const auto& [key, value] : plan.settings) {
    auto flag = "--" + key;
    std::ranges::replace(flag, '_', '-');
    line += fmt::format(" \\\n    {} {}", flag, quoted_word(value));
  }
  return line + " \\\n    " + program;
}

std::string plan_advice(const Plan& best, const std::string& program) {
  auto text = fmt::format("Take {}{}: a step takes {}, and a rank {}", best.settings.empty() ? "" : best.name + " on ", counted(best.world, "rank"),
                          plan_seconds(best.seconds()), short_bytes(best.peak()));
  if (best.memory > 0) text += " of " + short_bytes(best.memory);
  if (best.world > best.ranks_per_host) text += "; on each host, with its own number after --node-rank";
  return text + ":\n\n  " + launch_line(best, program) + "\n";
}

nlohmann::ordered_json json_of(const Plan& plan) {
  nlohmann::ordered_json json = {{"plan", plan.name},
                                 {"world", plan.world},
                                 {"settings", plan.settings},
                                 {"fits", plan.memory == 0 ? nlohmann::ordered_json() : nlohmann::ordered_json(plan.fits())},
                                 {"tokens_per_second", plan.tokens == 0 ? nlohmann::ordered_json() : nlohmann::ordered_json(plan.tokens_per_second())}};
  json.update(plan.outcome);
  json.erase("schedule");  // hundreds of lines
  return json;
}

}  // namespace tessera::cli
