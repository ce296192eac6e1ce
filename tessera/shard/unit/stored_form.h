// The values of a unit as the shards hold them, which the module's own members have for a while in place of what operators usually compute
// with.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "tessera/shard/unit/unit.h"

namespace tessera {

class StoredForm {
 public:
  /// Gathers the values, where the stored form differs from the computed one. The members are ordinary tensors then. Throws UsageError if
  /// the program may have written the unsharded form. Collective.
  explicit StoredForm(std::shared_ptr<Unit> unit);
  StoredForm(const StoredForm&) = delete;
  StoredForm& operator=(const StoredForm&) = delete;
  /// Logs an error if the program has written the members.
  ~StoredForm();

  /// Whether operators usually compute with another form of the group's values than the shards hold.
  static bool differs(const Unit& unit, const Unit::Group& group);
  /// Whether a part of the module is shown so now.
  static bool is_shown(const torch::nn::Module& module);
  /// Whether operators compute with what the shards hold of a part of the module: it is shown so, or may be written in that form.
  static bool is_used(const torch::nn::Module& module);

 private:
  struct Shown {
    const Unit::Group* group;
    const Unit::Parameter* parameter;
    at::Tensor member;
    int64_t version;
  };

  std::shared_ptr<Unit> unit_;
  std::vector<TaggedStoragePtr> kept_;  // the unsharded storages, which only members own
  std::vector<Shown> shown_;
  static std::atomic<int> count_;
};

}  // namespace tessera
