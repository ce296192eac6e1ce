// GGUF files of language models, as llama.cpp and its relatives read and write them: metadata, and tensors that may be quantized.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "tessera/base/atomic_write.h"
#include "tessera/base/input_file.h"
#include "tessera/checkpoint/formats/gguf/block_code.h"

namespace tessera::checkpoint {

struct Catalog;

/// The types of metadata in files, by their numbers there.
enum class GgufType : uint32_t { U8, I8, U16, I16, U32, I32, F32, Bool, Text, Array, U64, I64, F64 };

/// A number, a text, or a list of numbers or texts.
struct GgufValue {
  using Data = std::variant<int64_t, double, std::string, std::vector<int64_t>, std::vector<double>, std::vector<std::string>>;

  GgufType type = GgufType::U32;  // of the elements of a list; GgufType::Bool holds integers
  Data data = {};

  bool operator==(const GgufValue&) const = default;
};
/// In the order of the file.
using GgufMetadata = std::vector<std::pair<std::string, GgufValue>>;

struct GgufTensor {
  std::string name;
  std::vector<int64_t> sizes;  // the outermost first, as in libtorch
  const BlockCode* code = nullptr;
  uint64_t offset = 0;  // in the file
};

/// The header of a file, checked against the file's size. Throws IoError if it is damaged, and if a tensor has a code that we do not read.
class GgufFile {
 public:
  explicit GgufFile(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  const GgufMetadata& metadata() const { return metadata_; }
  const std::vector<GgufTensor>& tensors() const { return tensors_; }

  const GgufValue* find(const std::string& key) const;
  /// The value of a key, of the type that is asked for. Nothing if it is not there; another type is an IoError that names the key.
  std::optional<int64_t> integer(const std::string& key) const;
  std::optional<double> number(const std::string& key) const;
  std::optional<std::string> text(const std::string& key) const;
  const std::vector<std::string>* texts(const std::string& key) const;
  const std::vector<int64_t>* integers(const std::string& key) const;
  /// general.architecture, such as "llama". Throws IoError if it is missing.
  std::string architecture() const;
  /// Whether it holds no model, but an adapter of one.
  bool is_adapter() const { return text("general.type") == "adapter"; }

 private:
  template <class T>
  const T* get(const std::string& key) const;

  std::filesystem::path path_;
  GgufMetadata metadata_;
  std::vector<GgufTensor> tensors_;
};

bool is_gguf_file(const std::filesystem::path& path);

/// Returns the tensors under Hugging Face's names where they have one, else under their own. Rows of queries and keys that are in
/// llama.cpp's order are read in Hugging Face's. Leaves out the factors of rotary embeddings.
Catalog read_gguf(const GgufFile& file);
/// Reads one tensor under its own name, in the file's order of rows; undefined if there is none.
at::Tensor read_gguf_tensor(const GgufFile& file, const std::string& name);
/// The tensor with the divisors of the frequencies of rotary embeddings.
inline constexpr auto kRopeFactors = "rope_freqs.weight";

/// Translates the name of a Hugging Face tensor to its name in GGUF files, and back. Nothing if it has no counterpart.
std::optional<std::string> gguf_name(const std::string& name);
std::optional<std::string> name_of_gguf(const std::string& gguf);

/// Returns how many heads this Hugging Face tensor has rows of, if GGUF files of the architecture interleave the rows of a head in pairs,
/// else 0.
int64_t heads_in_pairs(std::string_view architecture, std::string_view name, int64_t heads, int64_t key_value_heads);
/// Reorders rows of the projection to queries or keys, {heads * size, inputs}, into llama.cpp's order, and back.
at::Tensor rows_for_gguf(const at::Tensor& weight, int64_t heads);
at::Tensor rows_of_gguf(const at::Tensor& weight, int64_t heads);

/// Writes tensors one after the other, in the order of `tensors`, whose `offset` it computes. The file appears under its name only when
/// close() is called.
class GgufWriter {
 public:
  GgufWriter(const std::filesystem::path& path, const GgufMetadata& metadata, std::vector<GgufTensor> tensors);

  void write(const at::Tensor& tensor);
  void close();

 private:
  void pad_to(uint64_t offset);

  std::vector<GgufTensor> tensors_;
  size_t next_ = 0;
  uint64_t written_ = 0;
  NewFile file_;
};

}  // namespace tessera::checkpoint
