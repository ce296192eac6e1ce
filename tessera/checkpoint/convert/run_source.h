// RunSource gives the tensors of a run to the writers of formats, in pieces that fit into memory. The run is a stored checkpoint, all of
// which one process writes, or it is in memory, and each rank writes its part. Writers work in the same way for both.
#pragma once

#include <c10/util/FunctionRef.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tessera/checkpoint/convert/writers.h"
#include "tessera/checkpoint/convert_options.h"
#include "tessera/checkpoint/live/live_run.h"
#include "tessera/checkpoint/stored/manifest.h"
#include "tessera/comm/communicator.h"

namespace tessera::checkpoint {

struct SourceTensor {
  std::string name;  // its name in the catalog
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> shape = {};
  // For a tensor of optimizer state: the name of its parameter, and PyTorch's key, which is empty for state that PyTorch does not keep. For
  // an extra tensor, the key is its name.
  std::string parameter = {}, key = {};

  int64_t bytes() const;
};

class RunSource {
 public:
  /// Takes a stored run. This process writes the parts of all ranks. Throws IoError if values are missing or damaged.
  RunSource(Manifest run, const ConvertOptions& options);
  /// Takes a run in memory; each process writes its part. If another rank fails, errors say `failure`, or, in end_on_first(),
  /// `end_failure`. Waits for another rank no longer than `world` allows.
  RunSource(LiveRun live, const ConvertOptions& options, const Communicator& world, std::string failure, std::string end_failure);

  bool is_first() const { return world_.is_first(); }
  /// Whether this process does item `number` of work that the processes share.
  bool is_for_me(size_t number) const;
  /// Throws IoError if this process does not see a file or folder that the first process has made.
  void expect_seen(const std::filesystem::path& path) const;
  /// Calls `act` in each process, or only in the first one. If it throws in one process, all processes throw. Collective.
  void on_each(c10::function_ref<void()> act) const;
  void on_first(c10::function_ref<void()> act) const;
  /// Like on_first(), for the step that gives files their names. Errors on other ranks say `end_failure`, because the output may be there
  /// already.
  void end_on_first(c10::function_ref<void()> act) const;
  /// Calls `fill`, which is collective, with a new folder under its unfinished name, and then gives the folder its name. If ranks are lost,
  /// the unfinished folder stays, because they may still write into it.
  void in_new_folder(const std::filesystem::path& path, c10::function_ref<void(const std::filesystem::path& folder)> fill) const;
  /// Returns the texts of all processes, in the order of the processes. Collective.
  std::vector<std::string> texts(const std::string& own) const;

  /// The ranks whose part this process writes.
  std::vector<int> ranks() const;
  /// The boxes of a tensor that a rank writes. If several ranks have a box, one of them writes it; rank 0 writes buffers.
  std::vector<TensorSlice> boxes(const SourceTensor& tensor, int rank) const;
  /// The argument `first` of copy(): the file from which a rank reads a box that several files have.
  size_t file_of(int rank) const { return is_live_ ? static_cast<size_t>(rank) : 0; }

  const Manifest& run() const { return run_; }
  const CatalogReader& stored() const { return stored_; }
  const ConvertOptions& options() const { return options_; }
  const std::vector<SourceTensor>& model() const { return model_; }
  const std::vector<SourceTensor>& state() const { return state_; }
  /// The extra tensors, which belong neither to the model nor to the optimizer. Their names are SourceTensor::key.
  const std::vector<SourceTensor>& beside() const { return beside_; }
  int64_t bytes() const { return all_; }

  /// Records the name of a tensor or a value that the format has no place for, and why. The writers of formats call this.
  void leave_out(const std::string& name, const std::string& why) const { left_out_.emplace(name, why); }
  const std::map<std::string, std::string>& left_out() const { return left_out_; }

  /// Calls `write` with the values of the box, piece by piece in row-major order. Reads values that several files have from file number
  /// `first`.
  void copy(const SourceTensor& tensor, const TensorSlice& box, c10::function_ref<void(const TensorSlice&, const at::Tensor&)> write,
            size_t first = 0) const;
  void copy(const SourceTensor& tensor, c10::function_ref<void(const at::Tensor&)> write) const;

  /// The notes of rank 0. Throws UsageError if the notes of other ranks differ, unless ConvertOptions::notes_of_first_rank is set.
  std::map<std::string, std::string> notes() const;
  /// The settings of the optimizer as in Python's param_groups, with names of parameters.
  nlohmann::json settings() const;
  /// The dtype that a tensor of the optimizer's state has in Python, where step counts are floats.
  static at::ScalarType python_dtype(const SourceTensor& tensor);

 private:
  void expect_known_settings(const nlohmann::json& group) const;
  /// Adds to the groups the names of parameters that only other ranks have, such as their experts.
  void add_parameters_of_others(nlohmann::json& groups) const;

  RunSource(Manifest run, CatalogReader stored, const ConvertOptions& options, Communicator world, std::string failure,
            std::string end_failure);

  Manifest run_;
  const ConvertOptions& options_;
  CatalogReader stored_;
  const Communicator world_;
  const std::string failure_, end_failure_;
  bool is_live_ = false;
  std::vector<SourceTensor> model_, state_, beside_;
  int64_t all_ = 0;
  mutable int64_t done_ = 0;
  mutable std::map<std::string, std::string> left_out_;
};

/// Parses a setting of an optimizer as JSON; returns it as a text if it is not JSON.
nlohmann::json setting_of(const std::string& text);
/// Returns a note as a value of Python: a number, a list and so on if the text is exactly the JSON of such a value, else the text.
nlohmann::json value_of_note(const std::string& text);

/// Throws UsageError if Tessera only reads the format, if `out` does not have the file ending of the format, if `out` is the prefix of a
/// run, or, for a Hub folder, if `out` has an adapter or a checkpoint of Tessera.
void expect_writable_as(const std::filesystem::path& out, Format format);
/// Throws UsageError for eight-bit state, which only Tessera's format has.
void expect_no_blocks(const Manifest& run);
/// Throws UsageError for a path in a store if the format needs a file system.
void expect_storable(const std::filesystem::path& out, Format format);

}  // namespace tessera::checkpoint
