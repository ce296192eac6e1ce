#include "tessera/checkpoint/formats/npy.h"

#include <c10/util/accumulate.h>
#include <fmt/format.h>

#include <algorithm>
#include <regex>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

const std::map<std::string, at::ScalarType> kNpyDtypes = {{"<f8", at::kDouble}, {"<f4", at::kFloat}, {"<f2", at::kHalf},
                                                          {"<i8", at::kLong},   {"<i4", at::kInt},   {"|i1", at::kChar},
                                                          {"|u1", at::kByte},   {"|b1", at::kBool}};

struct NpyArray {
  at::ScalarType dtype;
  std::vector<int64_t> shape, strides;
  uint64_t offset;  // of the values, in bytes
};

/// The header is a dict of Python: {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }
NpyArray read_npy_header(const InputFile& file) {
  const auto refuse = [&](const std::string& what) -> IoError {
    return IoError(fmt::format("{} is no array of numbers: {}", file.path().string(), what));
  };
  const auto begin = file.read_first(12);
  if (begin.size() < 10 || !begin.starts_with("\x93NUMPY")) throw refuse("it does not begin as NumPy's files do");
  const auto byte = [&](size_t i) { return static_cast<uint64_t>(static_cast<unsigned char>(begin[i])); };
  const bool is_first_version = byte(6) == 1;
  const uint64_t offset = is_first_version ? 10 + byte(8) + 256 * byte(9) : 12 + byte(8) + 256 * byte(9);
  const auto header = file.read_first(offset);
  static const std::regex form(R"(\{'descr': '([^']*)', 'fortran_order': (True|False), 'shape': \(([0-9, ]*)\))");
  std::smatch found;
  if (!std::regex_search(header, found, form)) throw refuse("its header is damaged");
  const auto dtype = kNpyDtypes.find(found[1]);
  if (dtype == kNpyDtypes.end()) throw refuse(fmt::format("libtorch has no dtype '{}'; save it as float32", found[1].str()));
  NpyArray array{.dtype = dtype->second, .shape = {}, .strides = {}, .offset = offset};
  const auto sizes = found[3].str();
  static const std::regex number("[0-9]+");
  for (std::sregex_iterator each(sizes.begin(), sizes.end(), number), end; each != end; ++each)
    array.shape.push_back(std::stoll(each->str()));
  array.strides.assign(array.shape.size(), 1);
  for (size_t i = 1; i < array.shape.size(); i++) {
    const auto d = found[2] == "True" ? i : array.shape.size() - 1 - i, before = found[2] == "True" ? d - 1 : d + 1;
    array.strides[d] = array.strides[before] * array.shape[before];
  }
  return array;
}

bool is_npy(const std::string& name) {
  return name.ends_with(".npy");
}

}  // namespace

bool is_npy_folder(const fs::path& folder) {
  return std::ranges::any_of(names_in(folder).value_or(std::vector<std::string>()), is_npy);
}

Catalog read_npy_folder(const fs::path& folder) {
  Catalog catalog;
  for (const auto& name : names_in(folder).value_or(std::vector<std::string>())) {
    if (!is_npy(name)) continue;
    const auto array = read_npy_header(InputFile(folder / name));
    const StoredBox all{.box = whole_slice(array.shape), .file = catalog.files.size(), .offset = array.offset, .strides = array.strides};
    catalog.tensors.emplace(fs::path(name).stem(), StoredTensor{.dtype = array.dtype, .shape = array.shape, .boxes = {all}});
    catalog.files.push_back(folder / name);
  }
  return catalog;
}

}  // namespace tessera::checkpoint
