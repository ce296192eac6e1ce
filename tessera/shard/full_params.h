// Whole parameters, for a while: for reading, for writing, for debugging.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tessera/shard/buffers.h"

namespace torch::nn {
class Module;
}

namespace tessera {

class Unit;

enum class Access { Read, Write };

/// While it lives, all parameters of the module are whole: the modules' own members can be read, also through raw pointers, until it ends (writing through one takes Access::Write). With
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

/// Where a collective leaves its result.
enum class Ranks { All, First };

/// The whole gradient that a shard's gradient is a part of, in the shape of the parameter. Undefined if there is none, and with
/// Ranks::First on the other ranks. Collective.
at::Tensor full_grad(const at::Tensor& shard, Ranks ranks = Ranks::All);

/// A copy of the whole parameter; with Ranks::First, undefined on the other ranks. Collective.
at::Tensor full_parameter(const at::Tensor& shard, Ranks ranks = Ranks::All);

/// Copies of all whole parameters and buffers of the module under their names; with Ranks::First, nothing on the other ranks. Each rank of
/// a sharded module has buffers of its own: `buffers` says what is made of them in the copies; the module's stay as they are. One unit is
/// gathered at a time. Collective; without a unit, nothing is communicated.
std::map<std::string, at::Tensor> full_state(const torch::nn::Module& module, Ranks ranks = Ranks::All,
                                             BufferSync buffers = BufferSync::Rank0);
/// Of one of them. Throws UsageError if the module has none of that name.
at::Tensor full_state(const torch::nn::Module& module, const std::string& name, Ranks ranks = Ranks::All,
                      BufferSync buffers = BufferSync::Rank0);

}  // namespace tessera
