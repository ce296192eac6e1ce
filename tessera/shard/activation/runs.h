// The runs of a segment: the first one is watched, later ones repeat it.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "tessera/shard/activation/course.h"
#include "tessera/shard/activation/held.h"
#include "tessera/shard/activation/saving_engine.h"
#include "tessera/shard/activation/segment.h"
#include "tessera/shard/dispatch/watcher.h"

namespace tessera::activation {

using Stack = torch::jit::Stack;

/// A run of a segment in this thread. It lasts as long as the object.
class SegmentRun : public Watcher, public SavedTensors {
 public:
  /// Of this thread, or null.
  static SegmentRun* current() { return dynamic_cast<SegmentRun*>(Watcher::current()); }

  bool opens(const OperatorFacts& op) const final;
  void hold(const at::Tensor& cast) final { casts_.push_back(cast); }
  std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() final;
  /// A tensor that autograd, or a segment inside, needs in backward.
  virtual Held save(const at::Tensor& tensor) = 0;

  /// What is to run inside of this one; see RunningSegment.
  virtual std::unique_ptr<SegmentRun> inner(const Options& options, const std::vector<at::Tensor>& inputs, detail::Again again,
                                            const torch::nn::Module* module) = 0;
  virtual void result(at::Tensor& tensor) const = 0;
  /// Whether this is a later run. From now on, what depends on that may be left out.
  virtual bool asked_runs_again() = 0;

 protected:
  explicit SegmentRun(std::shared_ptr<Log> log);
  bool keeps(const OperatorFacts& op) const;
  /// Whether the program has called the operator. A backward pass inside of a segment adds gradients up as it finds them, in place or not.
  bool is_of_program(const OperatorFacts& op) const;

  const std::shared_ptr<Log> log_;

 private:
  std::vector<at::Tensor> casts_;
  const int graph_task_;
  const Watching watching_;
};

class FirstRun final : public SegmentRun {
 public:
  FirstRun(const Options& options, const std::vector<at::Tensor>& inputs, detail::Again again, const torch::nn::Module* module,
           FirstRun* outer);
  ~FirstRun() override;

  void run(const c10::OperatorHandle& handle, const OperatorFacts& op, c10::DispatchKeySet below, Stack& stack) override;
  Held save(const at::Tensor& tensor) override;
  std::unique_ptr<SegmentRun> inner(const Options& options, const std::vector<at::Tensor>& inputs, detail::Again again,
                                    const torch::nn::Module* module) override;
  void result(at::Tensor&) const override {}
  bool asked_runs_again() override { return false; }

 private:
  FirstRun(std::shared_ptr<Segment> segment, FirstRun* outer);
  void note_operand(const at::Tensor& tensor, bool writes, const OperatorFacts& op);
  void note_write(const at::Tensor& tensor, const OperatorFacts& op);
  void note_course(const OperatorFacts& op, const Stack& stack, const std::vector<at::Tensor>& operands, const std::vector<bool>& written);
  void note_results(const Stack& stack, size_t base, const std::vector<at::Tensor>& operands);

  FirstRun* const outer_;
  const std::shared_ptr<Segment> segment_;
  using Storages = std::unordered_set<const c10::StorageImpl*>;
  // Kept, because memory that an input has left may be given to another tensor, and that one is no input.
  std::unordered_map<const c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>> inputs_;
  Storages own_, foreign_;                                       // own: made in this run; foreign: read, and neither of the others
  Storages from_inputs_;                                         // own ones whose values depend on inputs
  std::set<std::pair<const c10::StorageImpl*, int64_t>> reads_;  // what was read of foreign ones: where it begins
  Log::Kept* keeping_ = nullptr;                                 // the operator that runs, if it is kept
  const std::vector<at::Tensor>* operands_ = nullptr;            // its operands
};

class LaterRun final : public SegmentRun {
 public:
  /// Fills the slots of the segment. Without one, nobody needs what is saved.
  LaterRun(std::shared_ptr<Log> log, Segment* filled);
  ~LaterRun() override;

  void run(const c10::OperatorHandle& handle, const OperatorFacts& op, c10::DispatchKeySet below, Stack& stack) override;
  Held save(const at::Tensor& tensor) override;
  std::unique_ptr<SegmentRun> inner(const Options& options, const std::vector<at::Tensor>& inputs, detail::Again again,
                                    const torch::nn::Module* module) override;
  void result(at::Tensor& tensor) const override;
  bool asked_runs_again() override;

 private:
  /// A storage that the first run has changed, and the copy that this run changes.
  struct Copy {
    c10::intrusive_ptr<c10::StorageImpl> storage;
    at::Tensor bytes;
  };

  LaterRun(std::shared_ptr<Log> log, LaterRun* outer);
  void make_copies();
  bool has_copies() const { return !copies_.empty() || (outer_ != nullptr && outer_->has_copies()); }
  const Copy* copy_of(const at::Tensor& tensor) const;
  at::Tensor replaced(const at::Tensor& tensor) const;
  void expect_own_writes(const OperatorFacts& op, const Stack& stack) const;
  /// What was kept of an operator of the first run; null if nothing was.
  const Log::Kept* kept_at(size_t step);
  void repeat_kept(const Log::Kept& kept, const c10::OperatorHandle& handle, const OperatorFacts& op, c10::DispatchKeySet below,
                   Stack& stack);

  Segment* const filled_;
  LaterRun* const outer_ = nullptr;
  Follower follower_;
  std::vector<Copy> copies_;
  size_t saved_ = 0, kept_ = 0, inner_ = 0;  // how many have come, or been passed, so far
  bool ignores_ = false;                     // while an operator runs whose saved tensors are not counted
};

/// A tensor with these values that looks to autograd like one that was computed, or like a constant.
at::Tensor stand_in(const at::Tensor& values, bool requires_grad);

}  // namespace tessera::activation
