// The order in which one kind of pass uses units: recorded, and predicted from the last complete pass.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace tessera {

class Unit;

/// The kinds of pass through a model. Forward passes are told apart by whether they build a graph.
enum class Pass { None, Training, Evaluation, Backward };

/// Records the order in which one kind of pass uses units, and predicts the next pass from it. Compares units by address only and never
/// dereferences them.
class UseOrder {
 public:
  explicit UseOrder(Pass pass) : pass_(pass) {}

  Pass pass() const { return pass_; }
  /// Begins a pass, and predicts it from the last complete pass if there was one.
  void begin();
  /// Ends a complete pass, from which the next pass is predicted.
  void end();

  /// Records a use. Returns false for the first use in a pass that differs from the prediction. In evaluation, nothing marks where one pass
  /// ends and the next begins, so a sequence of uses also counts as a complete pass once it has occurred twice in a row.
  bool record(Unit* unit);

  /// The predicted remaining uses of this pass; empty if there is no prediction.
  std::span<Unit* const> to_come() const;
  /// Whether the pass has followed the prediction so far, for at least two uses.
  bool is_predicted() const { return trusted_ && next_ > 1; }
  bool used_last(const Unit* unit) const { return !current_.empty() && current_.back() == unit; }

 private:
  bool learn_from_repetition();

  Pass pass_;
  std::vector<Unit*> recorded_;  // uses of the last complete pass
  std::vector<Unit*> current_;   // uses of this pass so far
  bool trusted_ = false;         // a complete pass is recorded, and the present pass has followed it so far
  size_t next_ = 0;              // index in recorded_ of the next predicted use; only meaningful while trusted_
};

}  // namespace tessera
