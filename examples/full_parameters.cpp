// Whole parameters, to look at, to change, and to write to one file: tessera launch -n 2 full_parameters
#include <tessera/models/mlp.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cstdio>
#include <vector>

using namespace tessera;

int main() {
  const auto world = init();
  torch::manual_seed(1);
  models::Mlp model(models::MlpOptions{.width = 32, .layers = 2, .classes = 4});
  fully_shard(model);

  {
    const torch::NoGradGuard no_grad;
    const auto whole = full_params(*model, Access::Write);  // all ranks must make the same change
    model->head->weight.mul_(0.5);
    const auto* values = model->head->weight.data_ptr<float>();  // raw pointers are valid as long as `whole` exists
    if (world.rank() == 0) std::printf("first weight of the head: %g\n", static_cast<double>(values[0]));
  }

  // Empty on the other ranks.
  auto state = checkpoint::full_state_dict(*model, {.rank0_only = true});
  if (world.rank() == 0) state.at("head.bias").zero_();
  checkpoint::load_full_state_dict(*model, state, {.broadcast_from_rank0 = true});
  if (world.rank() != 0) return 0;
  std::vector<checkpoint::SafetensorsEntry> entries;
  for (const auto& [name, tensor] : state) entries.push_back({.name = name, .dtype = tensor.scalar_type(), .sizes = tensor.sizes().vec()});
  checkpoint::SafetensorsWriter file("whole.safetensors", entries);
  for (const auto& [name, tensor] : state) file.write(tensor);
  file.close();
  std::printf("%s", describe(*model).c_str());
}
