// Functions that norms and optimizers share: they check gradients, set the sink that takes gradients, and compute the factor of clipping.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "tessera/shard/gradient_sink.h"

namespace tessera {

class Schedule;
class Unit;

/// Throws UsageError if the list holds shards together with a trainable parameter whose gradient nobody averages, because it is in no unit
/// and in no ShardOptions::ignored. Never throws if the list holds no shards.
void expect_averaged(std::span<const at::Tensor> parameters);
/// Does the same for the modules that the schedule watches, once in each pass, to find parameters that were registered after fully_shard.
void expect_averaged(Schedule& schedule);
/// Throws DisagreementError on all ranks unless the ignored parameters in the list, and their gradients, are the same on all ranks. Stops
/// checking a parameter once its gradient has been other than zero. Collective if a parameter has to be checked.
void expect_ignored_alike(std::span<const at::Tensor> parameters);

/// Whether the parameter is in the ShardOptions::ignored of a model.
bool is_ignored(const at::Tensor& parameter);
/// Throws the UsageError of expect_averaged.
[[noreturn]] void refuse_not_averaged(
    const std::string& which,
    std::string_view advice = "shard the whole module last, freeze the parameter, or name it in ShardOptions::ignored");

/// Throws UsageError if some of the unit's gradients have not been reduced over the ranks, because a step would leave them out.
void expect_synced(Unit& unit);
/// Drops the unsynced gradients of one of the unit's shards.
void drop_unsynced(Unit& unit, const at::Tensor& shard);
/// Throws UsageError if some of these parameters are trained, and none of them has a gradient: a step would change nothing. With
/// UnusedParameters::Zeros, the error also says that other ranks wait for this rank's gradients.
void expect_gradients(std::span<const at::Tensor> parameters);
/// How often tessera::recover has dropped the gradients of these parameters. When the number grows, callers forget what they know about the
/// gradients.
uint64_t recoveries_of(std::span<const at::Tensor> parameters);

/// From the unit's next backward pass on, `sink` takes the gradients of some shards (GradientSink::takes), once in every step. The unit
/// does not own the sink. Throws UsageError if the unit has another sink.
void set_gradient_sink(Unit& unit, const std::shared_ptr<GradientSink>& sink);
/// Ends a step: the sink may take gradients of the unit again. Returns whether it has taken any since the last call.
bool end_step(Unit& unit);
/// Throws UsageError if a sink takes the gradient of this shard. `what`: the operation that needs the gradient.
void expect_gradient_kept(Unit& unit, const at::Tensor& shard, std::string_view what);

/// Throws UsageError unless max_norm is at least 0.
void expect_max_norm(double max_norm);
/// Returns the factor by which clip_grad_norm multiplies gradients that have this norm.
at::Tensor clip_factor(const at::Tensor& norm, double max_norm);

}  // namespace tessera
