// Loads a model from files of a checkpoint or from a state dict.
#pragma once

#include <c10/util/FunctionRef.h>

#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "tessera/checkpoint/live/value_source.h"
#include "tessera/checkpoint/load_options.h"
#include "tessera/checkpoint/stored/catalog.h"
#include "tessera/checkpoint/stored/places.h"
#include "tessera/checkpoint/stored/rank_file.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/groups/all_or_none.h"
#include "tessera/shard/access/local_values.h"

namespace tessera::checkpoint {

/// Loads a model from a ValueSource: first all ranks agree that everything fits, and then each rank copies the values that it needs.
class ModelPlan {
 public:
  /// Calls `first`, and then finds the model's values; throws UsageError if adapters are merged into them. `what` names the source in
  /// errors. Collective: an error on one rank is thrown on all.
  ModelPlan(
      const torch::nn::Module& model, const Communicator& world, Subject subject, std::string what,
      c10::function_ref<void()> first = [] {});

  /// Runs a step that changes nothing. Collective: an error on one rank is thrown on all.
  void together(c10::function_ref<void()> act) const;
  /// Throws on all ranks if the step that changes values has failed on one. Collective.
  void expect_finished(const AllOrNone& step) const;

  const LocalValues& values() const { return values_; }
  /// The names that only other ranks have.
  const std::set<std::string>& elsewhere() const { return elsewhere_; }

  /// Compares the stored tensors for which `of_model` is true with those of the model. Throws UsageError, and lists the differences, if
  /// there are any that the options do not allow. Also throws if the source lacks values of these tensors, or if the model's shards can't
  /// be written. `where` names the source in messages. Parameters of the model that are `in_base` keep their values if the source lacks
  /// them.
  void fit(
      std::unique_ptr<ValueSource> stored, const LoadOptions& options, const std::string& where, const std::set<std::string>& in_base = {},
      c10::function_ref<bool(const std::string& name)> of_model = [](const std::string&) { return true; });

  /// Copies the values that the ranks of this process need into the model.
  void load();

 private:
  void find(const std::string& name, const std::vector<std::string>& other_names, const at::Tensor& here,
            const std::vector<PartRecord>& parts);
  const HeldForm* form_of(const std::string& name) const;
  /// Loads a tensor of the model. `part` is null for a tensor that is not sharded.
  void fill(const std::string& name, const at::Tensor& to, const std::vector<PartRecord>& records, const LocalPart* part) const;
  /// Reads the values of a weight, and returns them, flat, in the form in which the parameter holds them.
  at::Tensor read_held(const std::string& stored, const HeldForm& form) const;

  const torch::nn::Module& model_;
  const Communicator& world_;
  const Subject subject_;
  const std::string what_;
  LocalValues values_;
  std::set<std::string> elsewhere_;
  std::unique_ptr<ValueSource> stored_;
  bool first_of_tied_ = false;
  std::map<std::string, std::string> found_;  // from the name of a tensor in the model to its stored name
  std::set<std::string> unused_;
  std::vector<std::string> missing_;
  std::vector<std::string> misfits_;
};

/// Makes a source of the files of a checkpoint. The reader must outlive it. The source throws IoError for values that the files lack.
std::unique_ptr<ValueSource> source_of(const CatalogReader& reader);

/// Returns the model's names, which readers of a checkpoint need. Parameters that match the patterns may be missing in the checkpoint.
ModelNames names_of(const LocalValues& model, const std::vector<std::string>& may_be_missing);

/// Whether one of these regular expressions matches the whole name. Throws UsageError for an invalid one.
bool matches(const std::string& name, const std::vector<std::string>& patterns);

/// The file from which a rank reads values that several files have: its own, if there is one.
size_t first_file(const CatalogReader& stored, int rank);

/// Throws IoError if bytes with a checksum are damaged. Each of `ranks`, which see the same files, verifies a share of the checksums: those
/// of its own file, if there is at least one file for each rank.
void verify_share(const CatalogReader& stored, const Communicator& world, std::span<const int> ranks);

/// Reads the part of a stored tensor that the record describes into flat values.
void read_part(const CatalogReader& stored, const std::string& name, const PartRecord& part, const at::Tensor& values, int rank);

}  // namespace tessera::checkpoint
