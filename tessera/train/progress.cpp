#include "tessera/train/progress.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::train {
namespace {

constexpr std::chrono::milliseconds kRedraw(100);
constexpr std::string_view kStartOfLine = "\r\x1b[K";  // moves the cursor to the start of the line and clears the line
// Columns that stay free: two for the ^C that a terminal echoes, and one because some terminals start the next row when the last column has
// text.
constexpr int kFree = 3;

double seconds(Display::Clock::duration time) {
  return std::chrono::duration<double>(time).count();
}

}  // namespace

Progress::Progress(ProgressOptions options, Display display)
    : options_(std::move(options)), display_(std::move(display)), begun_(display_.now()), drawn_(begun_), step_(options_.start) {
  if (options_.rank != 0) return;
  rate_.add(begun_, step_);
  if (display_.columns()) draw("");
}

Progress::~Progress() {
  try {
    finish();
  } catch (const std::exception&) {  // thrown by the program's own display; a destructor must not throw
  }
}

void Progress::update(int64_t step, Values values) {
  if (phase_ == Phase::Finished) {
    throw UsageError("update() was called after the progress of '{}' was finished; make a new Progress", options_.title);
  }
  phase_ = Phase::Running;
  if (options_.rank != 0) return;
  const auto now = display_.now();
  const auto before = std::exchange(step_, step);
  values_ = std::move(values);
  rate_.add(now, step);
  if (display_.columns()) {
    if (now - drawn_ >= kRedraw) draw("");
  } else if (const auto every = options_.at_end == AtEnd::Vanishes ? 0 : options_.line_every;
             every > 0 && step / every != before / every && step != options_.steps) {
    draw("\n");  // not for the last step, whose line finish() draws
  }
}

void Progress::say(std::string_view text) {
  if (options_.rank != 0) return;
  const bool bar = has_bar();
  display_.write(fmt::format("{}{}\n", bar ? kStartOfLine : "", text));
  if (bar) draw("");
}

void Progress::finish() {
  const bool bar = has_bar();
  const auto phase = std::exchange(phase_, Phase::Finished);
  if (phase == Phase::Finished || options_.rank != 0) return;
  if (options_.at_end == AtEnd::Vanishes) {
    if (bar) display_.write(kStartOfLine);
    return;
  }
  // The line of a bar has to be ended. Without a bar, nothing is printed if there was no step.
  if (phase == Phase::Running || bar) draw("\n");
}

void Progress::draw(std::string_view end) {
  drawn_ = display_.now();
  const auto columns = display_.columns();
  const auto text = columns ? std::string(kStartOfLine) + render_bar(state(), *columns - kFree, display_.glyphs) : render_line(state());
  display_.write(text + std::string(end));
}

ProgressState Progress::state() const {
  ProgressState result{.title = options_.title, .step = step_, .steps = options_.steps, .values = values_};
  auto rate = rate_.per_second();
  if (phase_ == Phase::Finished) {
    result.took = seconds(drawn_ - begun_);
    rate = *result.took > 0 && step_ > options_.start ? std::optional(static_cast<double>(step_ - options_.start) / *result.took)
                                                      : std::nullopt;
  } else if (rate && options_.steps > 0) {
    result.left = static_cast<double>(std::max<int64_t>(options_.steps - step_, 0)) / *rate;
  }
  if (rate) {
    const bool has_items = options_.items_per_step > 0;
    result.rate = *rate * static_cast<double>(has_items ? options_.items_per_step : 1);
    result.unit = has_items ? std::string_view(options_.items) : "steps";
  }
  return result;
}

}  // namespace tessera::train
