#include "tessera/shard/activation/segment.h"

#include <algorithm>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/shard/activation/buffer_check.h"
#include "tessera/shard/activation/segment_recompute.h"

namespace tessera::activation {

Segment::Segment(const SegmentCall& call)
    : options_(call.options),
      again_(call.again),
      module_(call.module),
      record_(std::make_shared<ForwardRecord>()),
      autocast_(devices_of(call.inputs)) {
  record_->keep = options_.keep;
  if (options_.preserve_rng_state) rng_.emplace(autocast_.devices());
}

void Segment::save_input(const at::Tensor& input, SavedTensor saved) {
  inputs_.push_back({.saved = std::move(saved), .requires_grad = input.requires_grad()});
}

void Segment::note_read(const at::Tensor& tensor) {
  if (tensor.is_inference()) return;
  reads_.push_back(
      {.counter = tensor.unsafeGetTensorImpl()->version_counter(), .version = version_of(tensor), .storage = storage_of(tensor)});
}

void Segment::forward_ends() {
  if (rng_ && *rng_ == RngState(autocast_.devices())) rng_.reset();  // nothing was drawn
  // What the segment itself has changed is changed again on copies.
  std::erase_if(reads_, [&](const Read& read) {
    return std::ranges::any_of(record_->writes, [&](const auto& write) { return write.storage._unsafe_get_target() == read.storage; });
  });
}

void Segment::expect_unchanged() const {
  for (const auto& read : reads_) {
    if (read.counter.current_version() == read.version) continue;
    throw UsageError(
        "a parameter or another tensor that a checkpointed segment reads was changed in place between forward and backward, by a step of "
        "an optimizer or an operator such as add_; run backward first");
  }
}

void Segment::recompute() {
  expect_unchanged();
  const BufferCheck buffers(module_);
  {
    const RestoredState restored(rng_, autocast_);
    std::vector<at::Tensor> inputs;
    for (const auto& [saved, requires_grad] : inputs_) inputs.push_back(stand_in(saved.get(), requires_grad));
    const SegmentRecompute pass(record_, *this);
    try {
      again_(inputs);
    } catch (const StopRecompute& stop) {
      if (stop.filled != this) throw;
    }
  }
  buffers.expect_unchanged();
}

}  // namespace tessera::activation
