#include "tessera/base/storage.h"

#include <map>
#include <mutex>
#include <utility>

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
  auto& [mutex, all] = registry();
  const std::lock_guard lock(mutex);
  if (storage) {
    all[scheme] = std::move(storage);
  } else {
    all.erase(scheme);
  }
}

// std::filesystem makes "s3:/run" and "s3:" of "s3://run" and its parent.
std::optional<Stored> stored(const std::filesystem::path& path) {
  const auto& text = path.native();
  const auto colon = text.find(':');
  if (colon == std::string::npos || (colon + 1 < text.size() && text[colon + 1] != '/')) return std::nullopt;
  auto& [mutex, all] = registry();
  const std::lock_guard lock(mutex);
  const auto found = all.find(std::string_view(text).substr(0, colon));
  if (found == all.end()) return std::nullopt;
  const auto begin = std::min(text.find_first_not_of('/', colon + 1), text.size());
  const auto end = text.find_last_not_of('/') + 1;
  return Stored{.storage = found->second, .name = text.substr(begin, end > begin ? end - begin : 0)};
}

}  // namespace tessera
