// Gives values to tensors that have none: from recorded operators, or from code that loads or initialises them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <string>

#include "tessera/shard/deferred/deferred_storage.h"
#include "tessera/shard/deferred/tape.h"
#include "tessera/shard/options.h"

namespace torch::nn {
class Module;
}

namespace tessera {

/// Visits the parameters and buffers of a module.
void for_each_named(const torch::nn::Module& module,
                    c10::function_ref<void(const at::Tensor& tensor, DeferredStorage::Kind kind, const std::string& name)> visit);

TapeTensor on_tape(const at::Tensor& tensor, const DeferredStorage& storage);
/// Gives the tensor this storage in place of its own.
void put_into(const at::Tensor& tensor, const DeferredStoragePtr& storage);

/// Whether the tensor is deferred, or on the meta device for another reason.
bool lacks_values(const at::Tensor& tensor);
/// Whether the tensor's values can be computed from recorded operators.
bool has_recipe(const at::Tensor& tensor);
/// The device where the tensor's values are or will be; `otherwise` for a meta tensor that is not deferred.
c10::Device device_of_values(const at::Tensor& tensor, c10::Device otherwise);

/// Computes the values of a tensor that has a recipe, in new memory. The tensor itself stays without values.
at::Tensor computed_values(const at::Tensor& tensor);
/// Whether any range of the tensor's values can be computed without the rest.
bool has_parts(const at::Tensor& tensor);
at::Tensor computed_values(const at::Tensor& tensor, const ValueRange& range);
/// A hash of the recipe of a tensor that has one.
uint64_t fingerprint_of_recipe(const at::Tensor& tensor);

/// Calls `init` to fill the values. If it assigns another tensor in their place, copies that tensor, or throws UsageError with the name if
/// its shape differs.
void initialise(const InitFunction& init, const std::string& name, const at::Tensor& values);

/// Gives the tensor this memory. Tensors that share its storage get it by follow_values().
void give_values(const at::Tensor& tensor, const at::Tensor& values);
/// If the storage of a deferred tensor has got values through another tensor, gives these values to this tensor, too. Returns whether it
/// did so.
bool follow_values(const at::Tensor& tensor);
/// Gives the tensor memory whose values are not defined.
void allocate_values(const at::Tensor& tensor, c10::Device otherwise);
/// Gives values to a tensor that lacks them: to a parameter from `init` or else from its recipe, to any other tensor from its recipe or
/// else from `init`. Returns false if there is neither. A use of the tensor is then an error with its name.
bool materialize(const at::Tensor& tensor, DeferredStorage::Kind kind, const std::string& name, const InitFunction& init,
                 c10::Device otherwise);
/// Makes any use of a meta tensor without a recipe an error with this name.
void expect_values_later(const at::Tensor& tensor, DeferredStorage::Kind kind, const std::string& name, c10::Device device);
/// Outdates tensors that still refer to the storage of a deferred tensor, whose values are in a unit or held in another form.
void abandon_values(const at::Tensor& tensor);

}  // namespace tessera
