#include "tessera/optim/average.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <torch/nn/module.h>

#include "tessera/base/error.h"
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
  const c10::impl::ExcludeDispatchKeyGuard below(kPagingKey);
  for (const auto& [name, parameter] : named_parameters(*model_)) {
    if (!at::isFloatingType(parameter.scalar_type()) && !at::isComplexType(parameter.scalar_type())) continue;
    // Made from options, which do not carry the paging key: the average is no shard.
    members_.push_back({.parameter = parameter, .average = at::empty_like(parameter, parameter.options()).copy_(parameter)});
  }
}

void Average::update() {
  expect_idle("Average::update");
  const c10::AutoGradMode no_grad(false);
  const c10::impl::ExcludeDispatchKeyGuard below(kPagingKey);
  for (auto& [parameter, average] : members_) average.lerp_(parameter, 1 - options_.decay);
}

void Average::assign() {
  expect_idle("Average::assign");
  const c10::AutoGradMode no_grad(false);
  const c10::impl::ExcludeDispatchKeyGuard below(kPagingKey);
  for (auto& [parameter, average] : members_) average.copy_(parameter);
}

void Average::swap() {
  expect_idle("Average::swapped");
  const c10::AutoGradMode no_grad(false);
  const auto units = local_values(*model_).units;
  const WriteGuard guard(units, WriteKind::Load);
  guard.outdate_all();
  const c10::impl::ExcludeDispatchKeyGuard below(kPagingKey);
  for (auto& [parameter, average] : members_) {
    const auto before = parameter.clone();
    at::Tensor(parameter).copy_(average);
    average.copy_(before);
  }
}

}  // namespace tessera::optim
