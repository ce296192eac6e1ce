// Storage: a place for files outside any file system, such as an object store.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace tessera {

/// The size in bytes of a part of an upload. The last part may be smaller, and part 0 larger. Later parts are larger, so that ten thousand
/// parts are enough for a terabyte.
constexpr size_t upload_part(int part) {
  return (size_t{16} << 20) << (part / 2000);
}

/// An object that is being uploaded. Without complete() nothing of it appears, and the destructor drops what was written.
class Upload {
 public:
  virtual ~Upload() = default;
  /// Parts are numbered from 0 on. Part 0 is written last, because the beginning of a file is known only when the rest is written.
  virtual void write(int part, std::span<const std::byte> bytes) = 0;
  /// Makes the whole object appear, and replaces an object of the same name. The object must last from then on.
  virtual void complete() = 0;
  /// Whether the store itself has compared all bytes of the complete object with checksums. If not, the object is read again.
  virtual bool is_verified() const { return false; }
};

/// The interface of a store. Any thread may call it. Failures are exceptions; IoError is for failures that users can fix. Once an upload is
/// complete, size() and read() find the object by its name, on every host; list() may include it only later.
class Storage {
 public:
  virtual ~Storage() = default;
  /// The size of an object in bytes, or nothing if there is none of this name.
  virtual std::optional<uint64_t> size(const std::string& name) = 0;
  /// Fills all of `to` with bytes from `offset` on.
  virtual void read(const std::string& name, uint64_t offset, std::span<std::byte> to) = 0;
  virtual std::unique_ptr<Upload> create(const std::string& name) = 0;
  /// The names of all objects that begin with `start`.
  virtual std::vector<std::string> list(const std::string& start) = 0;
  virtual void remove(const std::string& name) = 0;
};

/// Makes paths SCHEME://NAME lead to `storage`. Every rank calls it before it saves or loads; a null pointer removes the scheme.
void use_storage(const std::string& scheme, std::shared_ptr<Storage> storage);

/// The storage to which a path leads, and the name of the object in it.
struct ObjectPath {
  std::shared_ptr<Storage> storage;
  std::string name;
};
/// Returns nothing for a path in the file system.
std::optional<ObjectPath> object_path(const std::filesystem::path& path);

}  // namespace tessera
