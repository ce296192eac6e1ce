// What the norms and the optimizers have in common: whose gradients they accept, and how clipping scales them.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <span>
#include <string>

namespace tessera {

class Unit;

/// Throws UsageError if the list holds shards together with a trainable parameter whose gradient nobody averages: one that belongs to no
/// unit and is not in the ShardOptions::ignored of a unit of those shards. Never throws if the list holds no shards.
void expect_averaged(std::span<const at::Tensor> parameters);

/// Whether the parameter is in the ShardOptions::ignored of one of the units.
bool is_ignored(std::span<const std::shared_ptr<Unit>> units, const at::Tensor& parameter);
/// Throws the UsageError of expect_averaged.
[[noreturn]] void refuse_not_averaged(const std::string& which);

/// Throws UsageError if some of the unit's gradients have not been reduced over the ranks, because a step would leave them out.
void expect_synced(Unit& unit);
/// Drops such gradients of one of its shards.
void drop_unsynced(Unit& unit, const at::Tensor& shard);
/// How often tessera::recover has dropped the gradients of these parameters. What was known of gradients is forgotten when it grows.
uint64_t recoveries_of(std::span<const at::Tensor> parameters);

/// The factor by which clip_grad_norm multiplies gradients that have this norm.
void expect_max_norm(double max_norm);
at::Tensor clip_factor(const at::Tensor& norm, double max_norm);

}  // namespace tessera
