// Storage: where files lie that are in no file system, such as in an object store.
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

/// The bytes of a part of an upload. The last one may have fewer, and part 0 more. Later parts are larger, so that ten thousand are enough
/// for a terabyte.
constexpr size_t upload_part(int part) {
  return (size_t{16} << 20) << (part / 2000);
}

/// An object on its way. Without complete() nothing of it appears, and the destructor drops what was written.
class Upload {
 public:
  virtual ~Upload() = default;
  /// Parts are numbered from 0 on. Part 0 comes last: a file begins with what is known when the rest is written.
  virtual void write(int part, std::span<const std::byte> bytes) = 0;
  /// The object appears, whole, and replaces one of its name. It must last from then on.
  virtual void complete() = 0;
};

/// What a store must be able to do. Any thread may call it. Failures are exceptions; IoError is for what users can mend. Once an upload is
/// complete, size() and read() know it by its name, on every host; list() may come later.
class Storage {
 public:
  virtual ~Storage() = default;
  /// Bytes of an object, or nothing if there is none of this name.
  virtual std::optional<uint64_t> size(const std::string& name) = 0;
  /// Fills all of it.
  virtual void read(const std::string& name, uint64_t offset, std::span<std::byte> to) = 0;
  virtual std::unique_ptr<Upload> create(const std::string& name) = 0;
  /// The names of all objects that begin with `start`.
  virtual std::vector<std::string> list(const std::string& start) = 0;
  virtual void remove(const std::string& name) = 0;
};

/// From now on, paths SCHEME://NAME lead there. Every rank calls it before it saves or loads; a null pointer ends it.
void use_storage(const std::string& scheme, std::shared_ptr<Storage> storage);

/// The storage of a path, and its name there.
struct ObjectPath {
  std::shared_ptr<Storage> storage;
  std::string name;
};
/// Nothing for a path in the file system.
std::optional<ObjectPath> object_path(const std::filesystem::path& path);

}  // namespace tessera
