#include "tessera/base/storage.h"

#include <map>
#include <mutex>
#include <utility>

#include "tessera/base/error.h"

namespace tessera {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<Storage>, std::less<>> all;
};

Registry& registry() {
  static Registry registry;
  return registry;
}

}  // namespace

void use_storage(const std::string& scheme, std::shared_ptr<Storage> storage) {
  if (scheme.empty() || scheme.find_first_of(":/.") != std::string::npos)
    throw UsageError("use_storage was given the scheme '{}'; give it the name before ://, such as s3", scheme);
  auto& [mutex, all] = registry();
  const std::lock_guard lock(mutex);
  if (storage) {
    all[scheme] = std::move(storage);
  } else {
    all.erase(scheme);
  }
}

// Also accepts "s3:/run" and "s3:", because std::filesystem shortens "s3://run" to "s3:/run", whose parent is "s3:".
std::optional<ObjectPath> object_path(const std::filesystem::path& path) {
  const auto& text = path.native();
  const auto colon = text.find(':');
  if (colon == std::string::npos || (colon + 1 < text.size() && text[colon + 1] != '/')) return std::nullopt;
  auto& [mutex, all] = registry();
  const std::lock_guard lock(mutex);
  const auto found = all.find(std::string_view(text).substr(0, colon));
  if (found == all.end()) {
    const bool is_meant = text.compare(colon, 3, "://") == 0 && text.find('/') == colon + 1;
    if (!is_meant) return std::nullopt;
    if (text.starts_with("s3:")) {
      throw ConfigError("{}: this build has no s3://, because CMake found no libcurl from 7.88 on (libcurl4-openssl-dev); build it again",
                        text);
    }
    throw UsageError("{}: there is no storage {}://; add one by tessera::use_storage", text, text.substr(0, colon));
  }
  const auto begin = std::min(text.find_first_not_of('/', colon + 1), text.size());
  const auto end = text.find_last_not_of('/') + 1;
  return ObjectPath{.storage = found->second, .name = text.substr(begin, end > begin ? end - begin : 0)};
}

}  // namespace tessera
