// Takes the mean of a unit's gradients over all ranks: packs them, starts their reduction while backward continues, and finishes it later.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/base/event.h"
#include "tessera/shard/gradient_sink.h"
#include "tessera/shard/gradients/gradient_watch.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/shard/unit/versions.h"

namespace tessera {

/// The memory of a group's sharded gradient. The `.grad` of each shard is a view of `storage`; the reduction writes to `values`, which is
/// the same memory without the paging key. But if the gradients of a unit on a device are kept in host memory, `values` is device memory,
/// and its contents are then copied to `arrival`.
struct GradientMemory {
  TaggedStoragePtr storage;
  at::Tensor values;
  at::Tensor arrival = {};
  size_t group = 0;                 // index of the group in the unit
  std::shared_ptr<double> squares;  // the reduction writes the sum of squares of `values` here, if a norm was requested

  explicit operator bool() const { return storage != nullptr; }
};

/// The gradients of one backward pass that a sink takes.
struct SinkShare {
  std::shared_ptr<GradientSink> sink = {};
  c10::SmallVector<at::Tensor, 8> shards = {};
  c10::SmallVector<size_t, 2> groups = {};  // the numbers of all groups that are reduced
};

/// The operations on the sums of a reduction once they are complete.
struct AfterSum {
  bool all_reduces = false;  // whether the sums are all-reduced over the replicas
  bool is_part = false;      // whether the sums are kept until a later pass takes the mean over the replicas
  Reduce op = Reduce::Mean;
  double divisor = 1;
  bool is_plain() const { return !all_reduces && !is_part && divisor == 1 && op == Reduce::Mean; }
};

/// The reduction of one backward pass, from its packing to its end.
struct PassReduction {
  SinkShare share = {};
  AfterSum after = {};
  std::set<const Unit::Parameter*> packed = {};  // the parameters with a packed gradient; only filled if `after.is_part`
  std::string described = {}, writer = {};       // own the texts to which `subject` refers
  Subject subject = {};                          // compared by the replicas in their all-reduce
  Works works = {};
  c10::SmallVector<GradientMemory, 2> reduced = {};  // where `works` write their results
};

/// The gradients of a unit that no reduction has included yet.
class UnsyncedGradients {
 public:
  bool empty() const { return sums_.empty() && parts_.empty(); }
  /// Notes a pass that reduced nothing. All ranks call it, also ranks that have used no parameter of the unit in that pass.
  void expect() { expected_ = true; }
  /// Whether any rank may have unsynced gradients.
  bool may_exist() const { return expected_ || !empty(); }
  void clear() {
    expected_ = dropped_ = false;
    sums_.clear();
    parts_.clear();
    in_parts_.clear();
  }

  bool has(const Unit::Parameter& parameter) const { return sums_.contains(&parameter) || in_parts_.contains(&parameter); }
  /// A copy of the sum of a parameter's gradients on this rank; undefined if there is none. Throws UsageError if the gradient is already
  /// summed over the shard group, and waits for the all-reduce over the replicas.
  at::Tensor sum_of(const Unit::Parameter& parameter) const;

  /// Drops the unsynced gradient of a parameter, which is in the unit's group number `group`.
  void drop(const Unit::Parameter& parameter, size_t group);
  /// Whether anything was dropped since the last call. All ranks have to drop, or none.
  bool forget_drops() { return std::exchange(dropped_, false); }

  /// Adds gradients of whole parameters on this rank, in at least float32.
  void add(std::span<const Unit::Parameter* const> parameters, std::span<const at::Tensor> gradients);
  /// Adds the sums to gradients that are about to be reduced, and forgets the sums. Throws UsageError if a sum belongs to a parameter that
  /// has been frozen since. Parameters whose sums over this rank's shard group wait for the all-reduce get a gradient of zeros if they have
  /// none.
  void add_to(std::span<const Unit::Parameter* const> parameters, std::span<at::Tensor> gradients);

  /// Keeps a sum over this rank's shard group that was not all-reduced over the replicas.
  void add_part(size_t group, const at::Tensor& sum, const std::set<const Unit::Parameter*>& parameters);
  /// Adds the kept sum of a group to `sum`, and forgets it.
  void add_part_to(size_t group, const at::Tensor& sum);

 private:
  bool expected_ = false;  // whether expect() was called since the last reduction
  bool dropped_ = false;
  std::map<const Unit::Parameter*, at::Tensor> sums_;
  std::map<size_t, at::Tensor> parts_;         // keyed by the number of the group
  std::set<const Unit::Parameter*> in_parts_;  // the parameters that have a gradient in `parts_`
};

/// Returns a gradient of zeros for a parameter, which takes no memory.
at::Tensor zeros_like(const Unit::Parameter& parameter, c10::Device device);

class GradientReduction {
 public:
  GradientReduction(Unit& unit, const UnitSettings& settings, Versions& versions) : unit_(unit), settings_(settings), versions_(versions) {}
  ~GradientReduction() { forget_arriving(); }

  /// Packs the gradients of one backward pass. While it exists, no other thread can pack.
  class Packing {
   public:
    /// Copies the gradients of a group to their places in the buffer. Parameters without a gradient get zeros. Throws UsageError if a sink
    /// takes a gradient that the program expects to find elsewhere.
    void pack(size_t group, std::span<const Unit::Parameter* const> parameters, std::span<const at::Tensor> gradients);
    /// Starts the reduction, which writes this rank's part of the mean to the groups' gradient memory. Errors call the unit `name`.
    /// `members` is a hash over the parameters that have a gradient; ranks that differ in it get an error.
    void start(std::string_view name, uint64_t members);

   private:
    friend class GradientReduction;
    Packing(GradientReduction& reduction, std::span<const Unit::Group* const> groups, bool sums);

    void run_hook(const ReductionHook& hook, std::span<const Piece> pieces) const;

    GradientReduction& reduction_;
    c10::SmallVector<const Unit::Group*, 2> groups_;
    c10::SmallVector<bool, 2> keeps_;  // for each group, whether a shard of it gets a gradient
    bool widens_ = false;              // whether a group is sent in a wider dtype because the gradients are sums of several passes
    GradientBuffers buffers_;
    PassReduction pass_;
  };
  /// Begins to pack. Finishes the reduction of an earlier pass first. `sums`: the gradients are sums of several passes, which are not
  /// rounded back to the dtype of the gradients.
  Packing begin(std::span<const Unit::Group* const> groups, bool sums);
  /// Whether the reduction in flight gives the shards their gradients.
  bool gives_gradients() const { return !pass_.after.is_part; }

  /// The tensors to which the reduction in flight writes.
  std::vector<at::Tensor> results() const;

  UnsyncedGradients unsynced;
  /// Throws UsageError if there are unsynced gradients, or if gradients were lost: see lose().
  void expect_synced();
  /// Notes that values which the program has written to these gradients are lost: expect_synced() throws until the shards have other
  /// gradients.
  void lose(const std::vector<at::Tensor>& gradients, std::string why);

  /// The storage to which the last reduction of a group writes. Null if a sink takes all of it.
  TaggedStorage* target(const Unit::Group& group) const { return memories_[group.number].storage.get(); }
  /// Makes the next reductions use new memory, whose errors give the new name of the unit.
  void forget_memory() { memories_.clear(); }

  /// The sink that takes gradients of the unit; null if all shards get theirs.
  std::shared_ptr<GradientSink> sink() const { return sink_.lock(); }
  void set_sink(const std::shared_ptr<GradientSink>& sink) { sink_ = sink; }
  /// Whether a sink is going to take the reduction in flight, and so write the shards.
  bool writes_shards() const { return pass_.share.sink != nullptr; }
  /// Ends a step: the sink may take gradients again. Returns whether it has taken any since the last call.
  bool end_step() { return std::exchange(taken_, false); }

  /// Waits until this rank's part of the mean is complete, and a sink has taken its share. On a device, only work that is queued later
  /// waits; the host waits for gradients that go to host memory.
  void finish();
  /// Like finish(), but gradients may still be on their way to host memory, and the unit counts as reducing until finish() is called.
  void finish_sum();
  /// Drops a reduction that has not finished.
  void abandon();

  /// Makes later reductions also compute the sum of squares of their results, because a norm of the gradients was requested.
  void compute_squares() { wants_squares_ = true; }
  /// Sets the watch over the gradients of all units of a model.
  void watch(std::shared_ptr<GradientWatch> watch) { watch_ = std::move(watch); }

 private:
  GradientMemory make_memory(const Unit::Group& group, const at::Tensor& packed);
  bool is_sum(const Unit::Group& group, const at::Tensor& packed) const;
  void give_to_sink(const PartOfMean& mean);
  void drop_memory(const Unit::Group& group);
  void forget_arriving() noexcept;
  void finish_mean(const GradientMemory& memory);
  void expect_takeable(const Unit::Parameter& parameter) const;

  Unit& unit_;
  const UnitSettings& settings_;
  Versions& versions_;
  std::shared_ptr<GradientWatch> watch_;
  std::vector<GradientMemory> memories_;  // the memory of each group; reused by the next reduction
  std::weak_ptr<GradientSink> sink_;
  PassReduction pass_;                                // the reduction in flight
  c10::SmallVector<GradientMemory, 2> arriving_;      // the sums of the pass in flight that are being copied to host memory
  Event arrived_;                                     // passes when all of `arriving_` have arrived in host memory
  std::vector<std::pair<at::Tensor, int64_t>> lost_;  // gradients with their versions; see lose()
  std::string lost_why_;
  bool taken_ = false;  // whether the sink has taken gradients in this step
  bool wants_squares_ = false;
};

}  // namespace tessera
