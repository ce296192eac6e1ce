#include "tessera/shard/activation/segment_pass.h"

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "tessera/shard/dispatch/operators.h"

namespace tessera::activation {
namespace {

namespace ag = torch::autograd;

/// What stands in the graph for one tensor that was saved.
class SavedHooks final : public ag::SavedVariableHooks {
 public:
  explicit SavedHooks(SegmentPass& pass) : pass_(&pass) {}

  void call_pack_hook(const at::Tensor& tensor) override { saved_ = pass_->save(tensor); }
  at::Tensor call_unpack_hook() override { return saved_.get(); }

 private:
  SegmentPass* pass_;  // used at once only
  SavedTensor saved_;
};

}  // namespace

SegmentPass::SegmentPass(std::shared_ptr<ForwardRecord> record)
    : record_(std::move(record)), graph_task_(ag::get_current_graph_task_id()), watching_(this) {}

bool SegmentPass::is_of_program(const OperatorFacts& op) const {
  return !op.marks && !is_casting() && ag::get_current_graph_task_id() == graph_task_;
}

bool SegmentPass::keeps(const OperatorFacts& op) const {
  if (!record_->keep || op.views || !is_of_program(op)) return false;
  return std::ranges::none_of(op.writes, [](bool writes) { return writes; }) && !op.updates_statistics && record_->keep(op.name());
}

bool SegmentPass::opens(const OperatorFacts& op, c10::DispatchKeySet keys) const {
  // Running statistics and weights of recurrent modules are dealt with where the whole operator is seen.
  return record_->keep && op.implicit_autograd && op.is_composite(keys) && !op.updates_statistics && !op.recurrent && !op.views && !keeps(op);
}

std::unique_ptr<ag::SavedVariableHooks> SegmentPass::hooks() {
  return std::make_unique<SavedHooks>(*this);
}

}  // namespace tessera::activation
