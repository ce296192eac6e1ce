// Tensors without values, and how they get them: by what was recorded, or from whoever loads or initialises them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "tessera/shard/deferred/deferred_storage.h"
#include "tessera/shard/deferred/tape.h"
#include "tessera/shard/options.h"

namespace tessera {

TapeTensor on_tape(const at::Tensor& tensor, const DeferredStorage& storage);
/// Gives the tensor this storage in place of its own.
void put_into(const at::Tensor& tensor, const DeferredStoragePtr& storage);

/// Whether it is deferred, or on the meta device for another reason.
bool lacks_values(const at::Tensor& tensor);
/// Whether its values can be computed.
bool has_recipe(const at::Tensor& tensor);
/// The device of its values. `otherwise` is for a tensor of which nobody knows.
c10::Device device_of_values(const at::Tensor& tensor, c10::Device otherwise);

/// The values of a tensor that has a recipe, in new memory. The tensor still lacks them.
at::Tensor computed_values(const at::Tensor& tensor);
/// Whether ranges of them can be computed alone.
bool has_parts(const at::Tensor& tensor);
at::Tensor computed_values(const at::Tensor& tensor, const ValueRange& range);
/// A hash of the recipe of such a tensor.
uint64_t fingerprint_of_recipe(const at::Tensor& tensor);

/// Lets the function fill the values, or put a tensor of the same shape in their place, which is copied. Throws UsageError with the name
/// for one of another shape.
void initialise(const InitFunction& init, const std::string& name, const at::Tensor& values);

/// From now on the tensor has this memory, and so have all that share its storage.
void give_values(const at::Tensor& tensor, const at::Tensor& values);
/// If others have given values to the storage of a deferred tensor, lets the tensor see them.
bool follow_values(const at::Tensor& tensor);
/// Gives it memory with any values.
void allocate_values(const at::Tensor& tensor, c10::Device otherwise);
/// Gives values to a tensor that lacks them: for parameters by `init` if there is one, by its recipe, or by `init`. Returns false if there
/// is neither: then a use of it is an error with its name.
bool materialize(const at::Tensor& tensor, DeferredStorage::Kind kind, const std::string& name, const InitFunction& init,
                 c10::Device otherwise);
/// Any use of a tensor on the meta device that has no recipe is an error with this name from now on.
void expect_values_later(const at::Tensor& tensor, DeferredStorage::Kind kind, const std::string& name, c10::Device device);
/// Tensors that still refer to the storage of a deferred tensor are outdated: its values are in a unit now.
void abandon_values(const at::Tensor& tensor);

}  // namespace tessera
