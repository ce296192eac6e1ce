#include "tessera/llm/token_file.h"

#include <ATen/ATen.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>

#include <cstring>

#include "tessera/base/disk_memory.h"
#include "tessera/base/error.h"
#include "tessera/base/fd.h"
#include "tessera/base/input_file.h"
#include "tessera/base/no_copy.h"
#include "tessera/base/storage.h"
#include "tessera/checkpoint/formats/safetensors.h"

namespace tessera::llm {
namespace {

namespace fs = std::filesystem;

checkpoint::SafetensorsFile opened(const fs::path& path) {
  try {
    return checkpoint::SafetensorsFile(path);
  } catch (const IoError& error) {
    throw IoError("{}; tessera data tokenize makes a file of tokens from texts", error.what());
  }
}

}  // namespace

struct TokenFile::Mapping : NoCopy {
  Mapping(const fs::path& path, uint64_t size) : size(size) {
    if (object_path(path)) {
      copy = allocate_on_disk(size, {}, path.native());
      InputFile(path).read(data = copy.get(), size, 0);
      return;
    }
    const Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!file) throw IoError("can't open {}: {}", path, std::strerror(errno));
    data = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file.get(), 0);
    if (data == MAP_FAILED) throw IoError("can't map {} into memory: {}", path, std::strerror(errno));
  }
  ~Mapping() {
    if (!copy) ::munmap(data, size);
  }

  at::DataPtr copy;  // of an object in a store
  void* data;
  uint64_t size;
};

TokenFile::TokenFile(const fs::path& path) : path_(path) {
  const auto file = opened(path);
  const auto format = file.metadata().find("format"), vocabulary = file.metadata().find("vocabulary");
  const auto unlike = [&](const std::string& why) {
    return IoError("{} is damaged, or was not made by tessera data tokenize: {}", path, why);
  };
  if (format == file.metadata().end() || format->second != kFormat || !file.contains("tokens") || !file.contains("ends"))
    throw IoError("{} is not a file of tokens; tessera data tokenize makes one", path);
  if (file.info("tokens").dtype != at::kInt || file.info("ends").dtype != at::kLong) {
    throw unlike(fmt::format("'tokens' are {} and 'ends' are {}, but must be Int and Long", c10::toString(file.info("tokens").dtype),
                             c10::toString(file.info("ends").dtype)));
  }
  if (vocabulary == file.metadata().end()) throw unlike("its metadata have no 'vocabulary', which is one more than the largest token");
  mapping_ = std::make_shared<Mapping>(path, file.file().size());
  const auto* bytes = static_cast<const char*>(mapping_->data);
  tokens_ = {reinterpret_cast<const int32_t*>(bytes + file.offset("tokens")),
             static_cast<size_t>(file.info("tokens").bytes()) / sizeof(int32_t)};
  ends_ = {reinterpret_cast<const int64_t*>(bytes + file.offset("ends")), static_cast<size_t>(file.info("ends").bytes()) / sizeof(int64_t)};
  vocabulary_ = std::strtoll(vocabulary->second.c_str(), nullptr, 10);
  const auto pairs = file.metadata().find("pairs");
  pairs_ = pairs != file.metadata().end() && pairs->second == "1";
  if (pairs_ && ends_.size() % 2 != 0) throw unlike(fmt::format("it has pairs, but {} documents", ends_.size()));
  checksum_ = file.checksum("tokens");
  int64_t before = 0;
  for (const auto end : ends_) {
    if (end <= before || end > std::ssize(tokens_)) {
      throw unlike(
          fmt::format("a document ends at token {} of {}, and the one before it at {}; 'ends' must grow, because no document is empty", end,
                      tokens_.size(), before));
    }
    before = end;
  }
  if (before != std::ssize(tokens_)) throw unlike(fmt::format("its last document ends at token {} of {}", before, tokens_.size()));
}

}  // namespace tessera::llm
