// Catalog: which tensors a checkpoint has, and where their values are in its files. Every format is read into a Catalog; loading, merging,
// converting and comparing use only catalogs.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/input_file.h"
#include "tessera/base/tensor_slice.h"
#include "tessera/checkpoint/formats/stored_digest.h"

namespace tessera::checkpoint {

struct BlockCode;

/// A box of a tensor in a file: the value at box.offsets + i is value number `first + i * strides`, counted from byte `offset` on.
struct StoredBox {
  TensorSlice box;
  size_t file = 0;      // its number in Catalog::files
  uint64_t offset = 0;  // in bytes
  int64_t first = 0;
  std::vector<int64_t> strides = {};  // in values, not negative
};

struct StoredTensor {
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> shape = {};
  std::vector<StoredBox> boxes = {};           // several boxes may have the same values, as the boxes of replicas do
  std::optional<at::ScalarType> rounded = {};  // the dtype of the values in the files, if it differs from `dtype`
  const BlockCode* code = nullptr;             // the code of the blocks in the files, which decode to float32; null if there are none

  at::ScalarType dtype_in_files() const { return rounded.value_or(dtype); }
};

/// Bytes of a file with their checksum: XXH3 in 16 hexadecimal digits, or the CRC-32 of zip archives in 8.
struct StoredChecksum {
  size_t file = 0;
  uint64_t begin = 0, bytes = 0;
  std::string checksum;
  std::string name;  // name of the tensor in these bytes, or kHeaderName; for errors
};

/// The name of a rank file's header in StoredChecksum. The checksum of the header tells files of different saves apart.
inline constexpr auto kHeaderName = "header";
bool is_of_header(const StoredChecksum& bytes);

/// A number that all files of one save have, so that a reader notices a file of another save. Files of other programs have no such number.
struct SaveNumber {
  uint64_t number = 0;
  std::filesystem::path file = {};  // the first file that has the number
};
/// The name under which files hold the number: as an entry of a zip archive, or as metadata of a safetensors file or an index.
inline constexpr auto kSaveKey = "tessera_save";

struct Catalog {
  std::vector<std::filesystem::path> files = {};
  std::map<std::string, StoredTensor> tensors = {};
  std::map<std::string, nlohmann::json> values = {};  // plain values: numbers, texts, lists of them
  std::map<std::string, std::string> aliases = {};    // from each further name of a tied parameter to its first name
  std::set<std::string> buffers = {};                 // names of the model's buffers, if the format tells them
  std::vector<StoredChecksum> checksums = {};
  std::map<std::string, std::string> left_out = {};  // from the name of something that can't be used to the reason
  std::vector<std::string> faults = {};              // damage in parts that are left out, because the model loads without them
  std::optional<SaveNumber> save = {};
};

/// Calls `use` with stored boxes and the parts of `box` to take from them, which do not overlap. Prefers boxes in file number `first`.
/// Returns the parts of `box` that no stored box has.
std::vector<TensorSlice> for_each_part(const StoredTensor& tensor, const TensorSlice& box, size_t first,
                                       c10::function_ref<void(const StoredBox& stored, const TensorSlice& part)> use);
/// Returns the view of `part` in a tensor that has the values of `box`; `part` is inside `box`.
at::Tensor part_of(const at::Tensor& tensor, const TensorSlice& box, const TensorSlice& part);

/// Parses the number of a save. Throws IoError if the text is not one.
uint64_t save_number(std::string_view text, const std::string& file);
/// Records the number of the save in a file, if it has one. Throws IoError if the catalog has a file of another save.
void note_save(Catalog& catalog, std::optional<uint64_t> number, const std::filesystem::path& file);

/// Adds all of another catalog, with `before` in front of its names. Throws IoError if a tensor is in both catalogs, or if the catalogs are
/// of different saves.
void append(Catalog& all, Catalog part, const std::string& before = "");

/// Reads the values of a catalog's tensors. The constructor opens the files, and throws IoError if a file is missing or too short for what
/// the catalog says of it. Several threads may use one reader.
class CatalogReader {
 public:
  explicit CatalogReader(Catalog catalog);
  /// Takes the catalog's files, which are open already.
  CatalogReader(Catalog catalog, std::vector<InputFile> files);

  const Catalog& catalog() const { return catalog_; }
  /// Throws IoError if there is no tensor of this name.
  const StoredTensor& info(const std::string& name) const;

  /// Copies the values of a box of the tensor to `to`, a CPU tensor of the sizes of the box, of any dtype and strides. Reads only what it
  /// needs, and takes memory for a few MB. Values that several files have are read from file number `first` if that file has them. Throws
  /// IoError if the files lack values of the box.
  void read(const std::string& name, const TensorSlice& box, const at::Tensor& to, size_t first = 0) const;
  /// Reads the whole tensor.
  at::Tensor read(const std::string& name) const;

  /// Throws IoError if the files lack values of the tensor.
  void expect_complete(const std::string& name) const;
  /// Throws IoError if bytes are not those that were written.
  void verify(const StoredChecksum& bytes) const;
  /// Throws IoError if the header of a file is not as it was written.
  void verify_headers() const;
  /// As verify(), but returns whether the bytes are as written. damage() returns the error's text if they are not.
  bool is_as_written(const StoredChecksum& bytes) const;
  std::string damage(const StoredChecksum& bytes) const;

 private:
  void expect_sound(const std::string& name, const StoredTensor& tensor) const;

  Catalog catalog_;
  std::vector<InputFile> files_;
};

/// The checksum of bytes that are in a file.
std::string digest_of(const InputFile& file, uint64_t begin, uint64_t bytes, DigestKind kind);

}  // namespace tessera::checkpoint
