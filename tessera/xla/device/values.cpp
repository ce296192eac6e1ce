#include "tessera/xla/device/values.h"

#include "tessera/base/error.h"
#include "tessera/xla/device/storage.h"
#include "tessera/xla/device/views.h"

namespace tessera::xla {
namespace {

ProgramRunner* the_runner = nullptr;  // never destroyed: tensors in static storage end after main

std::shared_ptr<const Data> computed(const at::Tensor& tensor, const std::string& reader) {
  if (!is_xla(tensor)) throw UsageError("replicas() takes a tensor on xla, not on {}", tensor.device().str());
  const auto& cell = cell_of(tensor);
  // Makes one program of all that has been traced: a value computed alone would be computed again at the end of the step.
  if (cell.value && cell.value.node().kind == Node::Kind::Operation) runner().cut(reader);
  return runner().compute(read(tensor));
}

}  // namespace

void start_runner(ProgramRunner runner) { the_runner = new ProgramRunner(std::move(runner)); }

bool has_device() { return the_runner != nullptr; }

ProgramRunner& runner() {
  if (!the_runner) throw UsageError("there is no XLA device yet: call tessera::xla::init first");
  return *the_runner;
}

void step_boundary() { runner().cut(); }

Metrics metrics() {
  const auto lock = lock_device();
  auto all = runner().metrics();
  all.peak_memory = runner().peak_memory();
  return all;
}

std::vector<at::Tensor> replicas(const at::Tensor& tensor, const std::string& reader) {
  const auto lock = lock_device();
  std::vector<at::Tensor> values;
  const auto data = computed(tensor, reader);
  for (const auto& buffer : *data) values.push_back(runner().download(buffer));
  return values;
}

at::Tensor first_replica(const at::Tensor& tensor, const std::string& reader) {
  const auto lock = lock_device();
  return runner().download(computed(tensor, reader)->front());
}

at::Tensor from_replicas(const std::vector<at::Tensor>& tensors) {
  const auto lock = lock_device();
  if (tensors.size() != 1 && tensors.size() != static_cast<size_t>(runner().replicas())) {
    throw UsageError("from_replicas() got {} tensors for {} replicas: give one for each replica, or one for all", tensors.size(), runner().replicas());
  }
  for (const auto& tensor : tensors) {
    if (tensor.sizes() != tensors[0].sizes() || tensor.scalar_type() != tensors[0].scalar_type()) {
      throw UsageError("from_replicas() got tensors of several shapes or dtypes: give all of one shape and one dtype");
    }
  }
  const auto data = runner().upload(tensors);
  auto made = new_tensor(leaf(data, {tensors[0].scalar_type(), tensors[0].sizes().vec()}));
  cell_of(made).before = data;
  return made;
}

}  // namespace tessera::xla
