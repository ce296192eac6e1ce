// Whole parameters, for a while: for reading, for writing, for debugging.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace tessera {

class Unit;

enum class Access { Read, Write };

/// While it lives, all parameters of the module are whole: the modules' own members can be read, also through raw pointers. With
/// Access::Write they can be changed; each rank's part of what it wrote goes into its shards at the end, so all ranks must write alike.
/// Collective, at its beginning.
class [[nodiscard]] FullParams {
 public:
  FullParams(FullParams&&) = default;
  FullParams& operator=(FullParams&&) = delete;
  ~FullParams();

 private:
  friend FullParams full_params(const torch::nn::Module& module, Access access);
  FullParams() = default;

  std::vector<std::shared_ptr<Unit>> units_;
  Access access_ = Access::Read;
};

FullParams full_params(const torch::nn::Module& module, Access access = Access::Read);

/// The whole gradient that a shard's gradient is a part of, in the shape of the parameter. Undefined if there is none. Collective.
at::Tensor full_grad(const at::Tensor& shard);

/// A copy of the whole parameter. Collective.
at::Tensor full_parameter(const at::Tensor& shard);

}  // namespace tessera
