// The parameters that are gathered, freed and reduced together.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "tessera/shard/options.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/paging/paged_tensor.h"
#include "tessera/shard/paging/storage_tag.h"
#include "tessera/shard/unit/candidate.h"
#include "tessera/shard/unit/layout.h"
#include "tessera/shard/unit/unit_memory.h"

namespace tessera {

class Schedule;
class ScheduleLock;
class UnitState;

/// What one unit cost this rank since the last reset.
struct UnitCounters {
  uint64_t gathers = 0;
  uint64_t reductions = 0;
  uint64_t gathered_bytes = 0;  // received
};

/// Where a gradient lies: the shards' gradients are views of the storage, and the mean over all ranks is written to `values`.
struct GradientMemory {
  TaggedStoragePtr storage;
  at::Tensor values;
  std::shared_ptr<double> squares;  // of those, by the reduction, where somebody wants to know

  explicit operator bool() const { return values.defined(); }
};

/// A layout that has been chosen.
enum class UnitLayout { Flat, Rows, WholeParameters, Replicas };

/// What a unit is made of does not change; what changes while a model trains is its state, which needs the lock of its schedule.
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
    c10::weak_intrusive_ptr<TaggedStorage> unsharded{TaggedStoragePtr()};
    std::vector<Parameter> parameters = {};
    std::optional<Parameter> flat = {};  // Listing::Flat: the one that is listed in their place; its shard is the shard of each
    uint64_t fingerprint = 0;            // of the unsharded parameters that this rank brought
    bool optimizers_cast = false;        // what other ranks read is a cast copy, for which optimizers have loops


    /// Of this rank's chunk: what the shards are views of.
    TaggedStorage& own_storage() const { return *tagged_storage(flat ? flat->shard : parameters.front().shard); }
  };

  /// Moves the candidates into the unit, in place: their tensors stay the same objects, and their former memory is freed.
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
  const Codec& codec() const { return *codec_; }
  /// What it takes on this rank while it is unsharded.
  uint64_t unsharded_bytes() const { return unsharded_bytes_; }
  std::string_view residence() const;

  const std::shared_ptr<Schedule>& schedule() const { return schedule_; }
  /// Several units may become parts of a larger model. Not while the model is in use.
  void join(std::shared_ptr<Schedule> schedule) { schedule_ = std::move(schedule); }
  UnitState& state(const ScheduleLock& held);

  const UnitCounters& counters() const { return counters_; }
  void reset_counters() { counters_ = {}; }

  /// The parameter that a tensor is, unsharded or as a shard, or nothing.
  Parameter* find(const at::Tensor& tensor) const;
  /// The one whose shard, gradient or unsharded form a view of the unit's memory begins in.
  Parameter* around(const at::Tensor& view);
  /// The values of a parameter that each rank has for which the process stands, without padding.
  std::vector<ValueRange> ranges_of(const Parameter& parameter) const;
  const Parameter& operator[](const Origin& origin) const { return groups_[origin.group].parameters[origin.parameter]; }

  /// A pinned unit stays unsharded. Taken with the lock held, given back without.
  bool pinned() const { return pins_ > 0; }
  void pin() { pins_++; }
  void unpin() { pins_--; }
  /// An operator that builds a graph is about to use an unsharded parameter, or a view of one: freezing and thawing since the last pass
  /// take effect, of all parameters at once, so that a pass has its gradients in one reduction.
  void follow_training(const at::Tensor& used);
  /// Graphs that have saved the parameters of which `written` is a part are stale: a shard, a view of one, or undefined for all.
  void outdate(const at::Tensor& written);
  /// Whether its gradients are not there yet.
  bool is_reducing() const;
  /// Somebody asks for norms, so reductions shall compute them by the way.
  void expect_norms();

 private:
  friend class UnitState;
  friend class Versions;
  friend class GradientReduction;

  Unit(std::string name, const ShardOptions& options, UnitLayout layout, CodecPtr codec);

  // How it is made: build_unit.cpp.
  BufferLayout layout(std::span<const Candidate> candidates) const;
  BufferPlan plan(std::span<const Candidate> candidates) const;
  void add_group(std::vector<Candidate> candidates, MemoryPtr memory);
  TaggedStoragePtr make_storage(Role role, size_t group, int64_t numel, at::ScalarType dtype, c10::Device device);

  // What its state asks.
  using Buffers = c10::SmallVector<Buffer, 2>;
  Buffers buffers() const;
  Subject subject() const;
  void count_gather();
  void count_reduction() { counters_.reductions++; }

  std::string name_;
  const ShardOptions options_;
  const UnitLayout layout_;
  const CodecPtr codec_;
  const uint64_t number_;
  std::vector<Group> groups_;
  std::unordered_map<const c10::TensorImpl*, Parameter*> parameters_;  // of every unsharded parameter and every shard
  uint64_t unsharded_bytes_ = 0;
  std::shared_ptr<Schedule> schedule_;
  std::unique_ptr<UnitState> state_;
  UnitCounters counters_;
  std::atomic<int> pins_ = 0;
  std::atomic<uint64_t> followed_ = 0;  // the pass in which freezing and thawing was looked at last
};

/// The unit's own record of the parameter that a tensor is, unsharded or as a shard. All empty if it is neither.
struct Located {
  std::shared_ptr<Unit> unit;
  Unit::Group* group = nullptr;
  Unit::Parameter* parameter = nullptr;
};
Located locate(const at::Tensor& tensor);

}  // namespace tessera
