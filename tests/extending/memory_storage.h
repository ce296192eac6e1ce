// A store of one's own: objects in memory, for programs that save and load many times in one process, such as tests.
#pragma once

#include <tessera/extending.h>

#include <cstring>
#include <map>
#include <mutex>

namespace own {

class MemoryStorage : public tessera::Storage {
 public:
  std::optional<uint64_t> size(const std::string& name) override {
    const std::lock_guard lock(mutex_);
    const auto found = objects_.find(name);
    return found == objects_.end() ? std::nullopt : std::optional<uint64_t>(found->second.size());
  }
  void read(const std::string& name, uint64_t offset, std::span<std::byte> to) override {
    const std::lock_guard lock(mutex_);
    std::memcpy(to.data(), objects_.at(name).substr(offset, to.size()).data(), to.size());
  }
  std::unique_ptr<tessera::Upload> create(const std::string& name) override { return std::make_unique<Object>(*this, name); }
  std::vector<std::string> list(const std::string& start) override {
    const std::lock_guard lock(mutex_);
    std::vector<std::string> names;
    for (auto each = objects_.lower_bound(start); each != objects_.end() && each->first.starts_with(start); each++)
      names.push_back(each->first);
    return names;
  }
  void remove(const std::string& name) override {
    const std::lock_guard lock(mutex_);
    objects_.erase(name);
  }

 private:
  struct Object : tessera::Upload {
    Object(MemoryStorage& store, std::string name) : store(store), name(std::move(name)) {}
    void write(int part, std::span<const std::byte> bytes) override {
      parts[part].assign(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    }
    void complete() override {
      const std::lock_guard lock(store.mutex_);
      auto& whole = store.objects_[name];
      whole.clear();
      for (const auto& [number, bytes] : parts) whole += bytes;
    }
    MemoryStorage& store;
    std::string name;
    std::map<int, std::string> parts;
  };

  std::mutex mutex_;
  std::map<std::string, std::string> objects_;
};

}  // namespace own
