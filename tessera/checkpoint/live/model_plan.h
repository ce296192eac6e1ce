// ModelPlan: from which tensor of a checkpoint or of a state dict each tensor of a model is loaded.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>

#include "tessera/checkpoint/live/value_source.h"
#include "tessera/checkpoint/load_options.h"
#include "tessera/checkpoint/stored/catalog.h"
#include "tessera/checkpoint/stored/places.h"
#include "tessera/checkpoint/stored/rank_file.h"

namespace tessera {
class Communicator;
struct HeldForm;
struct LocalPart;
struct LocalValues;
}  // namespace tessera

namespace tessera::checkpoint {

class ModelPlan {
 public:
  /// Throws UsageError, which lists all that does not fit, unless the stored tensors `names` are those of the model or the options allow
  /// the difference. Throws if the source lacks values of them. `where` names the source in messages.
  ModelPlan(std::unique_ptr<ValueSource> stored, std::set<std::string> names, const LocalValues& model, const LoadOptions& options,
            const std::string& where, const std::set<std::string>& in_base = {});
  /// From files, which must stay open. Throws IoError if they lack values. Parameters of the model that are `in_base` keep their values if
  /// the files lack them.
  ModelPlan(const CatalogReader& stored, std::set<std::string> names, const LocalValues& model, const LoadOptions& options,
            const std::string& where, const std::set<std::string>& in_base = {});

  /// Copies what each rank of this process needs into the model, whose shards must be writable.
  void load(const LocalValues& model, const Communicator& world) const;

 private:
  void find(const std::string& name, const std::vector<std::string>& other_names, const at::Tensor& here,
            const std::vector<PartRecord>& parts, const HeldForm* form);
  void expect_parts(const std::string& name, std::span<const PartRecord> parts) const;
  void load_part(const LocalPart& part, const HeldForm* form, const Communicator& world) const;
  void load_whole(const std::string& name, const at::Tensor& tensor, const HeldForm* form, const Communicator& world) const;
  /// Reads the values of a weight, and returns them, flat, in the form in which the parameter holds them.
  at::Tensor read_held(const std::string& stored, const HeldForm& form, int rank) const;

  std::unique_ptr<ValueSource> stored_;
  bool first_of_tied_;
  std::map<std::string, std::string> found_;  // from the name of the model's tensor to that of the stored one
  std::set<std::string> unused_;
  std::vector<std::string> missing_;
  std::vector<std::string> misfits_;
};

/// The model's names, by which a checkpoint is understood. Parameters that match the patterns may be missing in it.
ModelNames names_of(const LocalValues& model, const std::vector<std::string>& may_be_missing);

/// Whether one of these regular expressions matches the whole name. Throws UsageError for an invalid one.
bool matches(const std::string& name, const std::vector<std::string>& patterns);

/// The file from which a rank reads values that several files have: its own, if there is one.
size_t first_file(const CatalogReader& stored, int rank);

/// Throws IoError if bytes with a checksum are damaged. Each of `ranks`, which see the same files, checks a share of them: if there are
/// enough files, those of its own file.
void verify_share(const CatalogReader& stored, const Communicator& world, std::span<const int> ranks);

/// Reads the part of a stored tensor that the record describes into flat values.
void read_part(const CatalogReader& stored, const std::string& name, const PartRecord& part, const at::Tensor& values, int rank);

}  // namespace tessera::checkpoint
