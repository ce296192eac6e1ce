// The parameters that are gathered, freed and reduced together.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "tessera/shard/unit/candidate.h"
#include "tessera/shard/paging/casts.h"
#include "tessera/shard/unit/layout.h"
#include "tessera/shard/paging/storage_tag.h"
#include "tessera/shard/options.h"
#include "tessera/shard/unit/unit_memory.h"

namespace tessera {

class Schedule;

/// What one unit cost this rank since the last reset.
struct UnitCounters {
  uint64_t gathers = 0;
  uint64_t reductions = 0;
  uint64_t gathered_bytes = 0;  // received
};

/// Where a gradient lies: the shards' gradients are views of the storage, and the sum over all ranks is written to `values`.
struct GradientMemory {
  c10::Storage storage;
  at::Tensor values;
  std::shared_ptr<double> squares;  // of those, by the reduction, where somebody wants to know

  explicit operator bool() const { return values.defined(); }
};

class Unit : public std::enable_shared_from_this<Unit> {
 public:
  struct Parameter {
    std::string name;        // in the largest module that fully_shard has seen so far
    std::string local_name;  // in the module that the unit was made of
    size_t index = 0;        // of the candidate that it was
    at::Tensor shard;        // a leaf, with as many dimensions as the parameter
    std::vector<int64_t> sizes, strides;
    Span span;
    OriginPtr origin;  // of what is computed from the shard
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> unsharded;
  };

  /// Parameters of one dtype that all train, or all do not: one flat buffer.
  struct Group {
    at::ScalarType dtype = at::kFloat, unsharded_dtype = at::kFloat;
    int64_t chunk = 0;
    at::Tensor own = {};           // this rank's chunk
    GradientMemory gradient = {};  // kept for the next one
    c10::weak_intrusive_ptr<c10::StorageImpl> unsharded{c10::intrusive_ptr<c10::StorageImpl>()};
    std::vector<Parameter> parameters = {};
    std::optional<Parameter> flat = {};  // Listing::Flat: the one that is listed in their place; its shard is the shard of each
    uint64_t fingerprint = 0;            // of the whole parameters that this rank brought

    bool casts() const { return unsharded_dtype != dtype; }
    /// Optimizers have loops that write this narrow copy along with the shards.
    bool optimizers_cast() const { return dtype == at::kFloat && unsharded_dtype == at::kBFloat16; }
    /// Of this rank's chunk, marked: what the shards are views of.
    c10::StorageImpl& own_storage() const {
      return *(flat ? flat->shard : parameters.front().shard).unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    }
  };

  /// Moves the candidates into the unit, in place: their tensors stay the same objects, their full memory is freed.
  static std::shared_ptr<Unit> make(std::string name, std::vector<Candidate> candidates, const ShardOptions& options,
                                    std::shared_ptr<Schedule> schedule);

  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;
  ~Unit();

  /// Its place in the model, as far as that is known: an outer fully_shard call knows more of it.
  const std::string& name() const { return name_; }
  void rename(const std::string& name);
  /// Tells it from others of its name, the same on all ranks.
  uint64_t number() const { return number_; }
  const Mesh& mesh() const { return options_.mesh; }
  const ShardOptions& options() const { return options_; }
  std::vector<Group>& groups() { return groups_; }
  const UnitCounters& counters() const { return counters_; }
  void reset_counters() { counters_ = {}; }
  const std::shared_ptr<Schedule>& schedule() const { return schedule_; }
  /// Several units may become parts of a larger model. Not while the model is in use.
  void join(std::shared_ptr<Schedule> schedule);

  // Everything below is called with the schedule's lock held, except for unpin().
  bool holds_memory() const { return state_ != State::Sharded; }  // whole, or about to be
  bool is_unsharded() const { return state_ == State::Unsharded; }
  bool pinned() const { return pins_ > 0; }
  void pin() { pins_++; }
  void unpin() { pins_--; }
  /// At the first use: throws UsageError if the ranks did not begin with the same parameters. Collective over the world.
  void expect_equal_start();
  /// All values have come from elsewhere, the same to all ranks: there is nothing to compare.
  void trust_start() { start_checked_ = true; }
  /// Begins to make it whole, and waits until it is. Where that fails, whoever waited gives it back.
  void unshard(const Fault& fault);
  void wait_for_unshard();
  void reshard();
  /// While whole: what is written there is nobody else's.
  void make_private();
  /// Operands in the dtype that the unit computes in.
  Casts& casts() { return casts_; }
  /// Another unit's turn.
  void end_visit() { casts_.clear(); }
  /// This rank will not read the unit again before its shards change.
  void done_reading() { memory_->done_reading(subject()); }
  /// A shard is about to change: what is whole is stale from now on.
  void about_to_write();
  /// The same, by an optimizer that writes what others read along with the shards.
  void about_to_update();
  /// This rank leaves its shards as they are where others change theirs.
  void skip_update();
  /// A raw pointer to the shards is handed out: what it changes later, without asking again, is found out.
  void hand_out_pointer();
  /// Throws UsageError if shards have changed through a pointer that was handed out before they were read last.
  void expect_untouched();
  /// Graphs that have saved the parameters of which `written` is a part are stale: a shard, a view of one, or undefined for all.
  void outdate(const at::Tensor& written);
  /// What other ranks read of a part of the shards (a flat tensor over it), if it is a narrower copy that optimizers write; else undefined.
  at::Tensor cast_copy(const at::Tensor& flat);
  /// All ranks have given up what they did with the unit. Its gradients are dropped.
  void start_anew();
  /// That its shards have, or will have when they are read next.
  uint64_t next_version() const { return version_ + (written_ ? 1 : 0); }
  /// An operator was about to write shards, in the middle of who knows what, and could not.
  bool write_broke_off() const { return write_broke_off_; }
  /// Others still read what changes were made of, so they can't have them before this rank reads the unit.
  bool late() const { return late_; }
  /// All changes are made: others may have them before this rank reads the unit.
  void publish();
  /// An operator that builds a graph is about to use one of the whole parameters, or a view of one: freezing and thawing since the last
  /// pass take effect, of all parameters at once, so that a pass has its gradients in one reduction. Without the lock.
  void follow_training(const at::Tensor& used);
  /// While whole: takes this rank's part of it into the shards.
  void keep_own_part();
  /// What it takes on this rank while whole.
  uint64_t unsharded_bytes() const { return unsharded_bytes_; }
  std::string_view residence() const { return memory_->name(); }

  /// Gradients go their way to the sum over all ranks, of which this rank's part lies in their groups' memory when it is finished.
  GradientRoom gradient_room(std::span<const GradientPlan> plans) { return memory_->gradient_room(plans); }
  void pack(const at::Tensor& room, const at::Tensor& gradient) const { memory_->pack(room, gradient); }
  /// Somebody asks for norms: from now on reductions find out the squares of what they add up. Without the lock.
  void expect_norms() { wants_squares_ = true; }
  /// Memory for the gradient of a group, which nobody has.
  const GradientMemory& gradient_memory(Group& group);
  /// Of the groups whose wholes these are, in order. `name` is what errors call the unit.
  void start_reduction(std::span<Group* const> groups, std::span<const at::Tensor> wholes, std::string_view name, uint64_t members);
  void finish_reduction();
  void abandon_reduction();
  /// Whether gradients are not there yet. Without the lock.
  bool reduces() const { return reduces_; }

  /// The one that a tensor is, whole or as a shard, or nothing.
  Parameter* find(const at::Tensor& tensor) const;
  /// The one whose shard, gradient or whole a view of the unit's memory begins in.
  Parameter* around(const at::Tensor& view);
  const Parameter& operator[](const Origin& origin) const { return groups_[origin.group].parameters[origin.parameter]; }

  /// While positive, operators may write whole parameters (inside full_params).
  int writers = 0;

 private:
  Unit(std::string name, const ShardOptions& options);
  at::ScalarType unsharded_dtype(at::ScalarType dtype) const;
  void wait_to_write();
  /// From now on the shards lie in memory that no other rank sees.
  void detach();
  uint64_t own_fingerprint() const;
  FlatLayout layout(std::span<const Candidate> candidates) const;
  BufferPlan plan(std::span<const Candidate> candidates) const;
  void add_group(std::vector<Candidate> candidates, std::shared_ptr<at::DataPtr> memory);
  using Buffers = c10::SmallVector<Buffer, 2>;
  Buffers buffers() const;
  void publish(std::span<const Buffer> buffers);
  Subject subject() const { return {.unit = name_, .number = number_, .version = version_}; }

  std::string name_;
  const ShardOptions options_;
  const uint64_t number_;
  std::vector<Group> groups_;
  std::unordered_map<const c10::TensorImpl*, Parameter*> parameters_;  // of every whole parameter and every shard
  std::unique_ptr<UnitMemory> memory_;
  std::shared_ptr<Schedule> schedule_;
  UnitCounters counters_;
  uint64_t unsharded_bytes_ = 0;
  uint64_t version_ = 0;                // of the parameters: how often they were read after a write
  bool written_ = false;                // since they were read last
  bool writable_ = false;               // nobody else reads what would be written
  bool late_ = false;                   // others still read what this rank has written anew
  bool detached_ = false;               // the shards lie in memory that no other rank sees, for good
  bool write_broke_off_ = false;
  std::optional<uint64_t> pointed_at_;  // a raw pointer to the shards is out; their fingerprint when they were published last
  bool stale_ = true;                   // what others read of them, where that is something else
  bool start_checked_ = false;
  std::atomic<bool> wants_squares_ = false;
  std::atomic<uint64_t> followed_ = 0;  // in which pass
  enum class State { Sharded, Unsharding, Unsharded } state_ = State::Sharded;
  Works unsharding_;
  Works reducing_;
  c10::SmallVector<GradientMemory, 2> reduced_;  // by that
  std::atomic<bool> reduces_ = false;
  Casts casts_;
  std::atomic<int> pins_ = 0;  // taken with the lock held, given back without
};

/// The unit's own record of the parameter that a tensor is, whole or as a shard. All empty if it is neither.
struct Located {
  std::shared_ptr<Unit> unit;
  Unit::Group* group = nullptr;
  Unit::Parameter* parameter = nullptr;
};
Located locate(const at::Tensor& tensor);

}  // namespace tessera
