#include "tessera/shard/activation/segment.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/shard/activation/runs.h"
#include "tessera/shard/activation/untouched.h"
#include "tessera/shard/storage/paged_tensor.h"

namespace tessera::activation {
namespace {

/// Ends a later run of a segment whose slots are full. No std::exception, so that nothing in between takes it for an error.
struct Full {
  const Segment* segment;
};

/// Puts the state of this thread and of the random generators back.
class Restored {
 public:
  Restored(const std::optional<RandomStates>& random, const AutocastState& autocast, const std::vector<c10::Device>& devices)
      : autocast_(devices) {
    if (random) {
      random_.emplace(random->devices());
      random->set();
    }
    at::autocast::increment_nesting();  // what autocast has cast is forgotten at the end
    autocast.set();
  }
  Restored(const Restored&) = delete;
  Restored& operator=(const Restored&) = delete;
  ~Restored() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    autocast_.set();
    if (random_) random_->set();
  }

 private:
  const AutocastState autocast_;
  std::optional<RandomStates> random_;
  const c10::AutoGradMode grad_{true};
};

}  // namespace

void refuse_change(const at::Tensor& tensor) {
  throw UsageError(fmt::format(
      "a {} tensor of shape [{}] that a checkpointed segment needs to run again was changed in place between forward and backward, "
      "by a step of an optimizer or an operator such as add_; run backward first, or change a copy",
      c10::toString(tensor.scalar_type()), fmt::join(tensor.sizes(), ", ")));
}

Segment::Segment(const Options& options, const std::vector<at::Tensor>& inputs, detail::Again again, const torch::nn::Module* module)
    : options_(options),
      again_(std::move(again)),
      module_(module),
      log_(std::make_shared<Log>()),
      devices_(devices_of(inputs)),
      autocast_(devices_) {
  log_->keep = options.keep;
  if (options.preserve_rng_state) random_.emplace(devices_);
}

void Segment::hold_input(const at::Tensor& input, Held held) {
  inputs_.push_back({.held = std::move(held), .requires_grad = input.requires_grad()});
}

void Segment::note_read(const at::Tensor& tensor) {
  if (tensor.is_inference()) return;
  reads_.push_back({.counter = tensor.unsafeGetTensorImpl()->version_counter(),
                    .version = version_of(tensor),
                    .storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()});
}

void Segment::first_run_ends() {
  if (random_ && *random_ == RandomStates(devices_)) random_.reset();  // nothing was drawn
  // What the segment itself has changed is repeated on copies.
  std::erase_if(reads_, [&](const Read& read) {
    return std::ranges::any_of(log_->writes, [&](const Log::Write& write) { return write.storage._unsafe_get_target() == read.storage; });
  });
}

size_t Segment::add_slot(const at::Tensor& tensor) {
  slots_.push_back({.sizes = tensor.sizes().vec(), .dtype = tensor.scalar_type()});
  return slots_.size() - 1;
}

void Segment::fill(size_t index, const at::Tensor& tensor) {
  auto& slot = slots_[index];
  if (tensor.sizes() != slot.sizes || tensor.scalar_type() != slot.dtype) {
    throw UsageError(fmt::format(
        "a checkpointed segment did something else when it ran again in backward: it saved a {} tensor of shape [{}] where it had "
        "saved a {} tensor of shape [{}] in forward; it must depend on nothing but its inputs and parameters",
        c10::toString(tensor.scalar_type()), fmt::join(tensor.sizes(), ", "), c10::toString(slot.dtype), fmt::join(slot.sizes, ", ")));
  }
  if (slot.wanted && !slot.value.defined()) {
    slot.value = without_graph(tensor);
    slot.version = version_of(slot.value);
    missing_--;
  }
  if (missing_ == 0) throw Full{this};
}

at::Tensor Segment::value_of(size_t index) {
  const std::lock_guard lock(mutex_);
  if (!slots_[index].value.defined()) run_again();
  const auto& slot = slots_[index];
  if (version_of(slot.value) != slot.version) refuse_change(slot.value);
  return slot.value;
}

void Segment::forget(size_t index) {
  const std::lock_guard lock(mutex_);
  slots_[index].wanted = false;
  slots_[index].value.reset();
}

void Segment::expect_unchanged() const {
  for (const auto& read : reads_) {
    if (read.counter.current_version() == read.version) continue;
    throw UsageError(
        "a parameter or another tensor that a checkpointed segment reads was changed in place between forward and backward, by a step of "
        "an optimizer or an operator such as add_; run backward first");
  }
}

void Segment::run_again() {
  expect_unchanged();
  const Untouched untouched(module_, *log_);
  missing_ = std::ranges::count_if(slots_, [](const Slot& slot) { return slot.wanted && !slot.value.defined(); });
  const Restored restored(random_, autocast_, devices_);
  {
    std::vector<at::Tensor> inputs;
    for (const auto& [held, requires_grad] : inputs_) inputs.push_back(stand_in(held.get(), requires_grad));
    LaterRun run(log_, this);
    try {
      again_(inputs);
    } catch (const Full& full) {
      if (full.segment != this) throw;
    }
  }
  untouched.expect();
  if (missing_ > 0) {
    throw UsageError(fmt::format(
        "a checkpointed segment did something else when it ran again in backward: {} of the tensors that it had saved in forward "
        "did not come again; it must depend on nothing but its inputs and parameters",
        missing_));
  }
  if (torch::autograd::get_current_graph_task_id() == -1) return;
  // Of a graph that is kept for another backward pass, no values are.
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this()] {
    const auto self = weak.lock();
    if (!self) return;
    const std::lock_guard lock(self->mutex_);
    for (auto& slot : self->slots_) slot.value.reset();
  });
}

}  // namespace tessera::activation
