// The order in which one kind of pass uses units: recorded, and predicted from the last complete pass.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace tessera {

class Unit;

/// Knows units by their addresses only, and looks into none of them.
class UseOrder {
 public:
  /// A pass begins. It is expected to go as the last complete one did.
  void begin();
  /// The pass was complete, so the next one is predicted from it.
  void end();

  /// How the end of a pass is seen.
  enum class PassEnds {
    WithWhatFollows,   // the caller says begin() and end()
    WhenOrderRepeats,  // nothing says it, as in evaluation: an order counts as a pass when it has come twice in a row
  };
  /// Records a use. False if it was not predicted, though the pass had been so far.
  bool record(Unit* unit, PassEnds pass_ends);

  /// The uses of this pass that are still to come; none if they are not known.
  std::span<Unit* const> to_come() const;
  /// In the middle of a pass that goes as predicted.
  bool is_predicted() const { return trusted_ && next_ > 1; }
  bool used_last(const Unit* unit) const { return !current_.empty() && current_.back() == unit; }

 private:
  bool learn_from_repetition();

  std::vector<Unit*> recorded_;  // by the last complete pass
  std::vector<Unit*> current_;   // by this one
  bool trusted_ = false;         // a complete pass is recorded, and this one has followed it so far
  size_t next_ = 0;              // as long as it is: the place in recorded_
};

}  // namespace tessera
