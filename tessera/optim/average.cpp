#include "tessera/optim/average.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <mutex>
#include <set>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/paging_key.h"
#include "tessera/comm/groups/same_on_all.h"
#include "tessera/shard/access/local_values.h"
#include "tessera/shard/access/shard_place.h"
#include "tessera/shard/access/write_guard.h"
#include "tessera/shard/forward_phase.h"
#include "tessera/shard/parameters.h"

namespace tessera::optim {
namespace {

/// The averages that are swapped in, of all models.
struct InPlace {
  std::mutex mutex;
  std::vector<Average*> averages;
};

InPlace& in_place() {
  static InPlace instance;
  return instance;
}

void leave_place(const Average& average) {
  auto& known = in_place();
  const std::lock_guard lock(known.mutex);
  std::erase(known.averages, &average);
}

}  // namespace

Average::Average(std::shared_ptr<torch::nn::Module> model, AverageOptions options) : model_(std::move(model)), options_(options) {
  if (!model_) throw UsageError("Average was given an empty shared_ptr; give it a model");
  if (!(options_.decay >= 0 && options_.decay < 1))
    throw UsageError("AverageOptions::decay is {}; it must be at least 0 and below 1", options_.decay);
  const c10::AutoGradMode no_grad(false);
  for (const auto& [name, parameter] : named_parameters(*model_)) {
    const auto dtype = parameter.scalar_type();
    if (!at::isFloatingType(dtype) && !at::isComplexType(dtype)) continue;
    const BelowPaging below;
    // TensorOptions do not carry the paging key, so the average is not a shard.
    const auto wide = parameter.options().dtype(at::isComplexType(dtype) ? dtype : at::promoteTypes(dtype, at::kFloat));
    members_.push_back({.parameter = parameter, .average = at::zeros_like(parameter, wide)});
  }
  expect_idle("the constructor of Average");
  expect_alone("the constructor of Average");
  if (has_values(local_values(*model_))) begin("Average");
}

Average::~Average() {
  leave_place(*this);
}

void Average::begin(const char* what) {
  if (has_begun_) return;
  expect_values(local_values(*model_), what);
  has_begun_ = true;
  copy_parameters();
}

void Average::expect_shards() const {
  if (std::ranges::none_of(members_, [](const Member& member) { return is_unsharded_form(member.parameter); })) return;
  throw UsageError("an Average was made before fully_shard, so it follows parameters that shards have replaced since; make it after fully_shard");
}

void Average::expect_alone(const char* what) const {
  Average* other = nullptr;
  {
    auto& known = in_place();
    const std::lock_guard lock(known.mutex);
    if (known.averages.empty()) return;
    std::set<const c10::TensorImpl*> own;
    for (const auto& member : members_) own.insert(member.parameter.unsafeGetTensorImpl());
    const auto shares = [&](const Member& member) { return own.contains(member.parameter.unsafeGetTensorImpl()); };
    for (auto* const average : known.averages) {
      if (average != this && std::ranges::any_of(average->members_, shares)) other = average;
    }
  }
  if (other == nullptr || !other->is_swapped()) return;
  throw UsageError(
      "{} was called while the model has another Average in place of its own parameters; call it after the swapped() of the "
      "other Average has ended or, if an exception ended that, after its restore()",
      what);
}

void Average::expect_usable(const char* what) {
  expect_idle(what);
  expect_shards();
  if (is_swapped()) {
    throw UsageError(
        "{} was called while the model has the average in place of its own parameters; call it after swapped() has ended or, if an exception "
        "ended it, after restore()",
        what);
  }
  expect_alone(what);
  begin(what);
}

void Average::expect_savable() {
  expect_shards();
  expect_alone("save (with Contents::average)");
  if (is_swapped()) {
    throw UsageError(
        "a save with Contents::average was called while the model has the average in place of its own parameters; save after swapped() "
        "has ended, or leave Contents::average out to save the average as a model");
  }
  begin("a checkpoint of an average");
}

void Average::update() {
  expect_usable("Average::update");
  const BelowPaging below;
  updates_++;
  for (auto& [parameter, average, own] : members_) average.lerp_(parameter.to(average.scalar_type()), 1 - options_.decay);
}

void Average::assign() {
  expect_usable("Average::assign");
  copy_parameters();
}

void Average::copy_parameters() {
  updates_ = 0;
  const BelowPaging below;
  for (auto& [parameter, average, own] : members_) average.copy_(parameter);
}

std::map<std::string, at::Tensor> Average::state(ConstModuleRef model) const {
  expect_shards();
  std::map<const c10::TensorImpl*, at::Tensor> averages;
  for (const auto& member : members_) averages[member.parameter.unsafeGetTensorImpl()] = member.average;
  std::map<std::string, at::Tensor> result;
  for (const auto& [name, parameter] : named_parameters(model)) {
    if (const auto found = averages.find(parameter.unsafeGetTensorImpl()); found != averages.end()) result[name] = found->second;
  }
  if (result.size() < averages.size()) throw UsageError("the average is of parameters that the model of the checkpoint does not have");
  return result;
}

void Average::was_loaded() {
  has_begun_ = true;
  updates_ = 0;
  forget_own();
}

void Average::forget_own() {
  for (auto& member : members_) member.own = at::Tensor();
  is_swapped_ = false;
  leave_place(*this);
}

/// Throws DisagreementError if ranks have updated their shards of the average differently: no other check would notice that.
void Average::expect_same() const {
  const auto world = world_of(*model_);
  const auto which = fmt::format("decay {} after {} updates", options_.decay, updates_);
  if (!world || world->traits().simulated || world->traits().traces) return;
  if (same_on_all(*world, std::hash<std::string>()(which), {.unit = "Average"})) return;
  throw DisagreementError(
      "ranks have different moving averages of the model, this rank has one with {}; make the Average with the same options on all ranks, and "
      "call update() equally often on each",
      which);
}

void Average::put_in() {
  const c10::AutoGradMode no_grad(false);
  const auto units = local_values(*model_).units;
  const WriteGuard guard(units, WriteKind::Operators);
  guard.outdate_all();
  const BelowPaging below;
  for (auto& [parameter, average, own] : members_) {
    own = at::empty_like(parameter, parameter.options()).copy_(parameter);
    at::Tensor(parameter).copy_(average);
  }
  set_swapped(units, true);
  is_swapped_ = true;
  auto& known = in_place();
  const std::lock_guard lock(known.mutex);
  known.averages.push_back(this);
}

void Average::restore() {
  expect_idle("Average::restore");
  if (!is_swapped()) return;
  const c10::AutoGradMode no_grad(false);
  const auto units = local_values(*model_).units;
  set_swapped(units, false);
  const WriteGuard guard(units, WriteKind::Operators);
  guard.outdate_all();
  const BelowPaging below;
  for (auto& [parameter, average, own] : members_) at::Tensor(parameter).copy_(std::exchange(own, at::Tensor()));
  forget_own();
}

/// Whether the average is in place of the parameters. Loading the model ends a swap, because the model then has its own parameters again.
bool Average::is_swapped() {
  if (is_swapped_ && !are_swapped(local_values(*model_).units)) forget_own();
  return is_swapped_;
}

Average::Swapped::Swapped(Average& average) : average_(average), exceptions_(std::uncaught_exceptions()) {
  average_.expect_usable("Average::swapped");
  average_.expect_same();
  average_.put_in();
}

Average::Swapped::~Swapped() noexcept(false) {
  if (std::uncaught_exceptions() > exceptions_) {
    log(LogLevel::Warning,
        "an exception left a model with its average in place of its own parameters; call recover() and Average::restore(), or load a "
        "checkpoint");
    return;
  }
  average_.restore();
}

}  // namespace tessera::optim
