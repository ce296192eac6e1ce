#include "tessera/checkpoint/live/generator_state.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <c10/core/DeviceType.h>

#include <mutex>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/checkpoint/stored/rank_file.h"

namespace tessera::checkpoint {

namespace {

/// A state from this rank's file, or from an earlier rank's file if fewer ranks have saved; undefined if the checkpoint has no states.
struct StoredState {
  at::Tensor state = {};
  size_t file = 0;
};

StoredState read_state(const CatalogReader& stored, const std::string& name, int rank) {
  if (name.empty()) return {};
  const auto& info = stored.info(name);
  if (info.boxes.empty()) return {};
  const auto file = info.boxes[static_cast<size_t>(rank) % info.boxes.size()].file;  // each rank that saved has one box
  StoredState result{.state = at::empty(info.shape, at::TensorOptions(at::kCPU).dtype(info.dtype)), .file = file};
  stored.read(name, whole_slice(info.shape), result.state, file);
  return result;
}

void set_state(at::Generator& generator, const StoredState& read, const CatalogReader& stored) {
  try {
    generator.set_state(read.state);
  } catch (const std::exception& error) {
    throw IoError("the state of the random generator in {} is damaged: {}", stored.catalog().files[read.file], first_line(error));
  }
}

}  // namespace

std::optional<at::Generator> read_generator(const CatalogReader& stored, const Manifest& manifest, int rank) {
  const auto read = read_state(stored, manifest.generator, rank);
  if (!read.state.defined()) return std::nullopt;
  auto generator = at::detail::createCPUGenerator();
  set_state(generator, read, stored);
  if (rank >= manifest.ranks) {
    const auto drawn = at::check_generator<at::CPUGeneratorImpl>(generator)->random64();
    generator.set_current_seed(drawn + static_cast<uint64_t>(rank));
  }
  return generator;
}

at::Tensor read_device_generator(const CatalogReader& stored, const Manifest& manifest, int rank, c10::Device device) {
  if (manifest.device_generator.empty()) return {};
  if (device.is_cpu() || manifest.device_generator != generator_name(device)) {
    log(LogLevel::Info, "the generator state '{}' of the checkpoint is not loaded, because it is for other devices than {}",
        manifest.device_generator, device.str());
    return {};
  }
  const auto read = read_state(stored, manifest.device_generator, rank);
  if (!read.state.defined()) return {};
  auto generator = at::globalContext().defaultGenerator(device).clone();
  set_state(generator, read, stored);
  if (rank >= manifest.ranks) generator.set_current_seed(generator.current_seed() + static_cast<uint64_t>(rank));
  return generator.get_state();
}

at::Tensor stored_device_generator(const CatalogReader& stored, const Manifest& manifest, int rank) {
  return read_state(stored, manifest.device_generator, rank).state;
}

std::string generator_name(c10::Device device) {
  return kGeneratorPrefix + c10::DeviceTypeName(device.type(), /*lower_case=*/true);
}

c10::Device device_with_generator(const Communicator& world) {
  const auto device = world.traits().device;
  try {
    at::globalContext().defaultGenerator(device);
    return device;
  } catch (const c10::Error&) {
    return at::kCPU;
  }
}

at::Tensor state_of_generator(c10::Device device) {
  auto generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_generator(c10::Device device, const at::Tensor& state) {
  auto generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

}  // namespace tessera::checkpoint
