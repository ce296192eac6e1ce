// A program that uses MPI itself, and trains over its communicator: mpirun -n 2 mpi_program
#include <mpi.h>
#include <tessera/mpi.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cstdio>

int main(int argc, char** argv) {
  int level = 0;  // with MPI_THREAD_MULTIPLE, Tessera uses MPI between hosts
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
  double loss = 0;
  {
    const auto world = tessera::init(MPI_COMM_WORLD);
    torch::manual_seed(1);
    torch::nn::Sequential model(torch::nn::Linear(16, 32), torch::nn::Tanh(), torch::nn::Linear(32, 1));
    tessera::fully_shard(model);
    tessera::optim::AdamW optimizer(tessera::parameters(*model), {.lr = 1e-2});
    torch::manual_seed(2 + world.rank());
    for (int step = 0; step < 100; step++) {
      const auto inputs = torch::randn({32, 16});
      const auto error = torch::mse_loss(model->forward(inputs), inputs.sum(1, true));
      error.backward();
      optimizer.step();
      optimizer.zero_grad();
      loss = error.item<double>();
    }
  }
  int ranks = 0, rank = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  double sum = 0;
  MPI_Reduce(&loss, &sum, 1, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
  if (rank == 0) std::printf("mean loss of %d ranks: %.2f\n", ranks, sum / ranks);
  MPI_Finalize();
}
