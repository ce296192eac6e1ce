// Units whose memory only notes the requests that it gets, so that tests can check schedules and versions alone.
#pragma once

#include <fmt/format.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/comm/self/self.h"
#include "tessera/shard/schedule/schedule.h"
#include "tessera/shard/schedule/unit_state.h"
#include "tessera/shard/unit/unit.h"

namespace tessera::testing {

/// The requests to the memory of all units: "unshard a", "publish a 1".
using Notes = std::vector<std::string>;

class NotingChunks final : public Chunks {
 public:
  NotingChunks(std::string unit, Notes& notes) : unit_(std::move(unit)), notes_(notes) {}

  MemoryPtr add(const BufferPlan& plan) override { return allocate_memory(static_cast<size_t>(plan.chunk) * 4, plan.device, plan.unit); }
  Works fill(std::span<const Buffer> buffers, const Subject& /*subject*/, std::span<at::Tensor> /*operands*/) override {
    notes_.push_back("unshard " + unit_);
    if (fails) throw CommError("no memory for " + unit_);
    for (const auto& buffer : buffers) buffer.unsharded->allocate("fake");
    return {};
  }
  bool in_place(const Buffer& /*buffer*/) const override { return false; }

  bool fails = false;

 private:
  const std::string unit_;
  Notes& notes_;
};

class NotingTurns final : public Turns {
 public:
  explicit NotingTurns(Notes& notes) : notes_(notes) {}

  Work wait_for_writers(const Subject& /*subject*/) override { return {}; }
  void done_reading(const Subject& subject) override { note("done", subject); }
  bool wait_for_readers(const Subject& subject) override {
    note("wait", subject);
    return readers();
  }
  bool keep_copy(size_t /*buffer*/, const at::Tensor& own) override {
    copy = at::zeros_like(own);
    return true;
  }
  void done_writing(std::span<const Buffer> /*buffers*/, const Subject& subject, bool make_copy) override {
    note(make_copy ? "copy" : "publish", subject);
  }
  at::Tensor published_copy(size_t /*buffer*/) const override { return copy; }
  void reset(const Subject& subject, bool /*again*/) override { note("reset", subject); }

  /// Whether waiting for readers succeeds.
  std::function<bool()> readers = [] { return true; };
  at::Tensor copy = {};

 private:
  void note(const std::string& what, const Subject& subject) {
    notes_.push_back(fmt::format("{} {} {}", what, subject.unit, subject.version));
  }

  Notes& notes_;
};

/// A unit of one parameter in a world of one rank.
struct FakeUnit {
  FakeUnit(const std::string& name, Notes& notes, Schedule& schedule) {
    unit = Unit::make(name, {{.name = name, .tensor = weight}}, {.mesh = self_world(), .residence = Residence::Gathered});
    auto own_chunks = std::make_unique<NotingChunks>(name, notes);
    auto own_turns = std::make_unique<NotingTurns>(notes);
    chunks = own_chunks.get();
    turns = own_turns.get();
    unit->memory().chunks = std::move(own_chunks);
    unit->memory().turns = std::move(own_turns);
    schedule.add(*unit);
  }
  bool is_unsharded() const {
    const auto held = unit->schedule()->lock();
    return unit->state(held).is_unsharded();
  }

  at::Tensor weight = at::ones({4}).requires_grad_();
  std::shared_ptr<Unit> unit;
  NotingChunks* chunks;
  NotingTurns* turns;
};

}  // namespace tessera::testing
