// GradScaler: scales the loss for training in float16, where small gradients would become zero. It has the semantics and the names of
// torch.amp.GradScaler.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>

namespace torch::optim {
class Optimizer;
}

namespace tessera::optim {

class Optimizer;

struct GradScalerOptions {
  double init_scale = 65536;
  double growth_factor = 2;        // multiplies the scale after growth_interval updates in a row without inf or NaN
  double backoff_factor = 0.5;     // multiplies the scale after an update with inf or NaN
  int64_t growth_interval = 2000;  // a number of updates
  bool enabled = true;             // if false, the scaler changes nothing, and step() always takes the step
};

/// All ranks scale by the same factor, and skip a step if any rank has found inf or NaN. It is a value: save() writes it as text, for
/// example for the notes of a checkpoint. After scale(loss).backward(), call step(optimizer) for each optimizer, and then update() once. To
/// clip gradients, call unscale_(optimizer) after backward(), then clip.
class GradScaler {
 public:
  /// `growth_tracker` is how many updates in a row had neither inf nor NaN. Throws UsageError if the options make no sense.
  explicit GradScaler(GradScalerOptions options = {}, int64_t growth_tracker = 0);

  at::Tensor scale(const at::Tensor& loss) const;
  /// Divides the gradients by the scale, so that they can be clipped. Collective.
  void unscale_(Optimizer& optimizer);
  void unscale_(torch::optim::Optimizer& optimizer);
  /// Takes the step, or skips it if a gradient is inf or NaN on any rank. Unscales the gradients first, if the program has not; Tessera's
  /// optimizers do so without another pass over memory. An optimizer that steps in backward can't be scaled. Returns whether the step was
  /// taken, which is the same on all ranks. Collective.
  bool step(Optimizer& optimizer);
  bool step(torch::optim::Optimizer& optimizer);
  /// Changes the scale for the next iteration.
  void update();

  double get_scale() const { return options_.enabled ? scale_ : 1; }
  const GradScalerOptions& options() const { return options_; }
  int64_t growth_tracker() const { return growth_tracker_; }

  /// One line of text; load() is the inverse, and throws UsageError for text of another form. Save between update() and the next step().
  std::string save() const;
  static GradScaler load(const std::string& text);

 private:
  /// The state of an optimizer since the last update.
  struct Progress {
    bool finite = true;
    bool stepped = false;
    uint64_t recoveries = 0;  // see recoveries_of()
  };

  template <class O>
  Progress* progress_of(O& optimizer);
  template <class O>
  void unscale_any(O& optimizer, bool now);
  template <class O>
  bool step_any(O& optimizer);

  GradScalerOptions options_;
  double scale_;
  int64_t growth_tracker_;
  std::map<const void*, Progress> progress_;  // the progress of each optimizer that was unscaled since the last update
};

}  // namespace tessera::optim
