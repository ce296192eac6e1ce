// ModelPlan: from which tensor of a checkpoint each tensor of a model is loaded.
#pragma once

#include <map>
#include <set>
#include <string>

#include "tessera/checkpoint/catalog.h"
#include "tessera/checkpoint/load_options.h"
#include "tessera/checkpoint/rank_file.h"

namespace tessera {
class Communicator;
struct LocalPart;
struct LocalValues;
}  // namespace tessera

namespace tessera::checkpoint {

class ModelPlan {
 public:
  /// Throws UsageError, with all that does not fit, unless the stored tensors `names` are those of the model or the options allow the
  /// difference. Throws IoError if values are missing in the files. `where` is the checkpoint in messages.
  ModelPlan(const CatalogReader& stored, std::set<std::string> names, const LocalValues& model, const LoadOptions& options,
            const std::string& where);

  /// Copies what each rank of this process needs into the model, whose shards must be writable.
  void load(const LocalValues& model, const Communicator& world) const;

 private:
  void find(const std::string& name, const std::vector<std::string>& other_names, const at::Tensor& here, at::IntArrayRef shape);
  void load_part(const LocalPart& part, const Communicator& world) const;
  void load_whole(const std::string& name, const at::Tensor& tensor, const Communicator& world) const;

  const CatalogReader& stored_;
  std::map<std::string, std::string> found_;  // from the name of the model's tensor to that of the stored one
  std::set<std::string> unused_;
  std::vector<std::string> missing_;
  std::vector<std::string> misfits_;
};

/// The file from which a rank reads what several files have: its own, if there is one.
size_t first_file(const CatalogReader& stored, int rank);

/// Reads the part of a stored tensor that the record describes into flat values.
void read_part(const CatalogReader& stored, const std::string& name, const PartRecord& part, const at::Tensor& values, int rank);

}  // namespace tessera::checkpoint
