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

/// The types of metadata, with their numbers in files.
enum class GgufType : uint32_t { U8, I8, U16, I16, U32, I32, F32, Bool, Text, Array, U64, I64, F64 };

/// A number, a text, or a list of numbers or texts.
struct GgufValue {
  using Data = std::variant<int64_t, double, std::string, std::vector<int64_t>, std::vector<double>, std::vector<std::string>>;

  GgufType type = GgufType::U32;  // of the elements if `data` is a list; a Bool is an integer in `data`
  Data data = {};

  bool operator==(const GgufValue&) const = default;
};
/// Keys and values, in the order of the file.
using GgufMetadata = std::vector<std::pair<std::string, GgufValue>>;

struct GgufTensor {
  std::string name;
  std::vector<int64_t> sizes;  // the outermost first, as in libtorch
  const BlockCode* code = nullptr;
  uint64_t offset = 0;  // in the file
};

/// The header of a GGUF file, checked against the file's size. The constructor throws IoError if the header is damaged, or if a tensor has
/// a code that Tessera does not read.
class GgufFile {
 public:
  explicit GgufFile(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  const GgufMetadata& metadata() const { return metadata_; }
  const std::vector<GgufTensor>& tensors() const { return tensors_; }

  const GgufValue* find(const std::string& key) const;
  /// Returns the value of a key; nothing, or null, if the file lacks the key. Throws IoError, which names the key, if the value has another
  /// type.
  std::optional<int64_t> integer(const std::string& key) const;
  std::optional<double> number(const std::string& key) const;
  std::optional<std::string> text(const std::string& key) const;
  const std::vector<std::string>* texts(const std::string& key) const;
  const std::vector<int64_t>* integers(const std::string& key) const;
  const std::vector<double>* numbers(const std::string& key) const;
  /// general.architecture, such as "llama". Throws IoError if it is missing.
  std::string architecture() const;
  /// Whether the file holds an adapter instead of a model.
  bool is_adapter() const { return text("general.type") == "adapter"; }

 private:
  template <class T>
  const T* get(const std::string& key) const;

  std::filesystem::path path_;
  GgufMetadata metadata_;
  std::vector<GgufTensor> tensors_;
};

bool is_gguf_file(const std::filesystem::path& path);

/// Returns the tensors under Hugging Face's names; a tensor without such a name keeps its own. Changes the rows of query and key
/// projections from llama.cpp's order to Hugging Face's, and subtracts the 1 that has_one_added() says. Leaves out factors of rotary
/// embeddings.
Catalog read_gguf(const GgufFile& file);
/// Reads the tensor of this name in the file, with its rows in the file's order. Returns an undefined tensor if the file has none.
at::Tensor read_gguf_tensor(const GgufFile& file, const std::string& name);
/// The tensor with the divisors of the frequencies of rotary embeddings.
inline constexpr auto kRopeFactors = "rope_freqs.weight";
/// Those of LongRoPE, for long and for short texts.
inline constexpr auto kLongFactors = "rope_factors_long.weight", kShortFactors = "rope_factors_short.weight";

/// Translates the name of a Hugging Face tensor to its name in GGUF files of the architecture, and back. Returns nothing if the name has no
/// counterpart. GGUF files stack the tensors of a layer's experts; the Hugging Face name of such a stack has kAnyExpert for the number.
std::optional<std::string> gguf_name(std::string_view architecture, const std::string& name);
std::optional<std::string> name_of_gguf(std::string_view architecture, const std::string& gguf);
inline constexpr auto kAnyExpert = "*";
/// Where the number of the expert lies in a Hugging Face name: its begin and size. Nothing for a tensor of no expert.
std::optional<std::pair<size_t, size_t>> number_of_expert(std::string_view name);
/// Whether GGUF files of the architecture have 1 added to this Hugging Face tensor: the norms of Gemma.
bool has_one_added(std::string_view architecture, std::string_view name);

/// Returns how many heads the rows of this Hugging Face tensor belong to if GGUF files of the architecture interleave the two halves of
/// each head's rows; else 0.
int64_t heads_in_pairs(std::string_view architecture, std::string_view name, int64_t heads, int64_t key_value_heads);
/// Reorders rows of the projection to queries or keys, {heads * size, inputs}, into llama.cpp's order, and back.
at::Tensor rows_for_gguf(const at::Tensor& weight, int64_t heads);
at::Tensor rows_of_gguf(const at::Tensor& weight, int64_t heads);

/// Writes tensors one after the other, in the order of `tensors`, and computes their offsets itself. The file appears under its name only
/// when close() is called.
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
