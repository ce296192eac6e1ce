#include "tessera/optim/average.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <torch/nn/module.h>

#include <exception>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/paging_key.h"
#include "tessera/shard/access/local_values.h"
#include "tessera/shard/access/phases.h"
#include "tessera/shard/access/write_guard.h"
#include "tessera/shard/parameters.h"

namespace tessera::optim {

Average::Average(std::shared_ptr<torch::nn::Module> model, AverageOptions options) : model_(std::move(model)), options_(options) {
  if (!model_) throw UsageError("Average was given an empty shared_ptr; give it a model");
  if (!(options_.decay >= 0 && options_.decay < 1))
    throw UsageError(fmt::format("AverageOptions::decay is {}; it must be at least 0 and below 1", options_.decay));
  const c10::AutoGradMode no_grad(false);
  for (const auto& [name, parameter] : named_parameters(*model_)) {
    const auto dtype = parameter.scalar_type();
    if (!at::isFloatingType(dtype) && !at::isComplexType(dtype)) continue;
    const c10::impl::ExcludeDispatchKeyGuard below(kPagingKey);
    // Made from options, which do not carry the paging key: the average is no shard.
    const auto wide = parameter.options().dtype(at::isComplexType(dtype) ? dtype : at::promoteTypes(dtype, at::kFloat));
    members_.push_back({.parameter = parameter, .average = at::zeros_like(parameter, wide)});
  }
  if (has_values(local_values(*model_))) begin("Average");
}

void Average::begin(const char* what) {
  if (has_begun_) return;
  expect_values(local_values(*model_), what);
  has_begun_ = true;
  assign();
}

void Average::expect_usable(const char* what) {
  expect_idle(what);
  if (is_swapped_) throw UsageError(fmt::format("{} was called while the model has the average in place of its own parameters", what));
  begin(what);
}

void Average::expect_savable() {
  if (is_swapped_) {
    throw UsageError(
        "a run was to be saved while its model has the average in place of its own parameters; save after swapped() has ended, or leave "
        "Contents::average out to save the average as a model");
  }
  begin("a checkpoint of an average");
}

void Average::update() {
  expect_usable("Average::update");
  const c10::AutoGradMode no_grad(false);
  const c10::impl::ExcludeDispatchKeyGuard below(kPagingKey);
  for (auto& [parameter, average, own] : members_) average.lerp_(parameter.to(average.scalar_type()), 1 - options_.decay);
}

void Average::assign() {
  expect_usable("Average::assign");
  const c10::AutoGradMode no_grad(false);
  const c10::impl::ExcludeDispatchKeyGuard below(kPagingKey);
  for (auto& [parameter, average, own] : members_) average.copy_(parameter);
}

std::map<std::string, at::Tensor> Average::state(const torch::nn::Module& model) const {
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
  for (auto& member : members_) member.own = at::Tensor();
  has_begun_ = true;
  is_swapped_ = false;
}

void Average::put_in() {
  const c10::AutoGradMode no_grad(false);
  const auto units = local_values(*model_).units;
  const WriteGuard guard(units, WriteKind::Operators);
  guard.outdate_all();
  const c10::impl::ExcludeDispatchKeyGuard below(kPagingKey);
  for (auto& [parameter, average, own] : members_) {
    own = at::empty_like(parameter, parameter.options()).copy_(parameter);
    at::Tensor(parameter).copy_(average);
  }
}

void Average::take_out() {
  const c10::AutoGradMode no_grad(false);
  const auto units = local_values(*model_).units;
  const WriteGuard guard(units, WriteKind::Operators);
  guard.outdate_all();
  const c10::impl::ExcludeDispatchKeyGuard below(kPagingKey);
  for (auto& [parameter, average, own] : members_) at::Tensor(parameter).copy_(std::exchange(own, at::Tensor()));
}

Average::Swapped::Swapped(Average& average) : average_(average), exceptions_(std::uncaught_exceptions()) {
  average_.expect_usable("Average::swapped");
  average_.put_in();
  average_.is_swapped_ = true;
}

Average::Swapped::~Swapped() noexcept(false) {
  if (std::uncaught_exceptions() > exceptions_) {
    log(LogLevel::Warning, "an exception left the average of a model's weights in place of its own; load a checkpoint");
    return;
  }
  if (!average_.is_swapped_) return;  // both were loaded meanwhile
  expect_idle("the end of Average::swapped");
  average_.take_out();
  average_.is_swapped_ = false;
}

}  // namespace tessera::optim
