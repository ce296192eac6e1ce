#include "tessera/shard/activation/segment.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <string>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/tied.h"
#include "tessera/shard/activation/segment_recompute.h"
#include "tessera/shard/unit/units.h"

namespace tessera::activation {
namespace {

/// Checks that a recomputation leaves the buffers of a module unchanged. Checks only buffers in host memory, where values can be read.
class BufferCheck {
 public:
  /// The module may be null.
  explicit BufferCheck(const torch::nn::Module* module) : module_(module) {
    if (module == nullptr) return;
    for (const auto& item : module->named_buffers()) {
      if (!item.value().defined()) continue;
      if (const auto values = digest_of(item.value())) buffers_.push_back({.name = item.key(), .values = *values});
    }
  }
  /// Throws UsageError with the name of a buffer that was changed since the constructor ran: assigned, or written through a pointer.
  void expect_unchanged() const {
    if (buffers_.empty()) return;
    const auto now = module_->named_buffers();
    for (const auto& buffer : buffers_) {
      const auto* const found = now.find(buffer.name);
      if (found != nullptr && found->defined() && digest_of(*found) == buffer.values) continue;
      throw UsageError(
          "a checkpointed segment has changed the buffer '{}' of {} again when it ran again in backward, by an assignment or through a "
          "pointer. Change it in place by an operator, as in buffer.copy_(x), whose effect backward does not repeat; or outside of the "
          "segment; or only if activation::is_recompute() returns false",
          buffer.name, class_name(*module_));
    }
  }

 private:
  struct Buffer {
    std::string name;
    uint64_t values;
  };

  const torch::nn::Module* const module_;
  std::vector<Buffer> buffers_;
};

}  // namespace

Segment::Segment(const SegmentCall& call, std::shared_ptr<ForwardRecord> record)
    : options_(call.options),
      again_(call.again),
      module_(call.module),
      record_(std::move(record)),
      devices_(devices_of(call.inputs)),
      autocast_(devices_) {
  record_->keep = options_.keep;
  if (options_.preserve_rng_state) rng_.emplace(devices_);
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
  if (rng_ && *rng_ == RngState(devices_)) rng_.reset();  // forward drew no random numbers, so a recomputation need not restore the state
  // A recomputation repeats the segment's own changes on copies, so expect_unchanged() need not check the versions of these tensors.
  std::erase_if(reads_, [&](const Read& read) {
    return std::ranges::any_of(record_->writes, [&](const auto& write) { return write.storage._unsafe_get_target() == read.storage; });
  });
}

void Segment::expect_unchanged() const {
  for (const auto& read : reads_) {
    if (read.counter.current_version() != read.version) refuse_change("a parameter or another tensor that a checkpointed segment reads");
  }
}

void Segment::recompute() {
  expect_unchanged();
  const BufferCheck buffers(module_);
  {
    const RestoredState restored(devices_, rng_, autocast_);
    std::vector<at::Tensor> inputs;
    for (const auto& input : inputs_) inputs.push_back(input.saved.get());
    inputs = tied(std::move(inputs), std::exchange(gradients_, {}));
    for (size_t i = 0; i < inputs.size(); i++) inputs[i] = stand_in(inputs[i], inputs_[i].requires_grad);
    const SegmentRecompute pass(record_, this, nullptr);
    try {
      again_(inputs);
    } catch (const StopRecompute& stop) {
      if (stop.filled != this) throw;
    }
  }
  buffers.expect_unchanged();
}

}  // namespace tessera::activation
