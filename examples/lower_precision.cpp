// Trains in float16: FullyShardedDataParallel casts what goes into the model, and a scaler of the loss keeps small gradients from becoming
// zero. Then the same without the class, in bfloat16, which needs no scaler.
#include <tessera/models/mlp.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cstdio>

namespace {

using namespace tessera;

const models::MlpOptions kShape{.width = 32, .layers = 2, .classes = 4};

at::Tensor some_rows() {
  return torch::randn({16, kShape.width});
}

at::Tensor classes_of(const at::Tensor& rows) {
  return rows.slice(1, 0, kShape.classes).argmax(1);
}

double train_in_float16(const Communicator& world) {
  FullyShardedDataParallel model(models::Mlp(kShape), world,
                                 {.auto_wrap_policy = wrap_by_size({.min_params = 1000}), .compute_dtype = torch::kHalf});
  optim::AdamW optimizer(model.parameters(), {.lr = 3e-3});
  optim::GradScaler scaler;
  double last = 0;
  for (int step = 0; step < 100; step++) {
    const auto x = some_rows();
    const auto loss = torch::cross_entropy_loss(model(x).to(torch::kFloat), classes_of(x));
    scaler.scale(loss).backward();
    scaler.unscale_(optimizer);  // only because the gradients are clipped
    optimizer.clip_grad_norm(1.0);
    scaler.step(optimizer);  // left out on all ranks if a gradient is inf or NaN on one
    scaler.update();
    optimizer.zero_grad();
    last = loss.item<double>();
  }
  return last;
}

double train_in_bfloat16(const Communicator& world) {
  models::Mlp model(kShape);
  fully_shard(model, {.mesh = world, .mixed_precision = {.param_dtype = torch::kBFloat16, .output_dtype = torch::kFloat}});
  optim::AdamW optimizer(model->parameters(), {.lr = 3e-3});
  double last = 0;
  for (int step = 0; step < 100; step++) {
    const auto x = some_rows();
    const auto loss = torch::cross_entropy_loss(call(model, x), classes_of(x));  // call casts x, and the scores to float32
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    last = loss.item<double>();
  }
  return last;
}

}  // namespace

int main() {
  const auto world = init();
  torch::manual_seed(1);
  const auto half = train_in_float16(world), brain = train_in_bfloat16(world);
  if (world.rank() == 0) std::printf("loss in float16 %.3f, in bfloat16 %.3f\n", half, brain);
}
