/* The same collectives by MPI. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static int ascending(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  int rank, world;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  const long megabytes[] = {1, 16, 64};
  const char *names[] = {"all_gather", "reduce_scatter", "all_reduce"};
  for (int size = 0; size < 3; size++) {
    const long bytes = megabytes[size] << 20, numel = bytes / 4 / world * world;
    float *whole = malloc(numel * sizeof(float)), *own = malloc(numel / world * sizeof(float));
    for (long i = 0; i < numel; i++) whole[i] = 1;
    for (long i = 0; i < numel / world; i++) own[i] = 1;
    for (int operation = 0; operation < 3; operation++) {
      double times[9];
      for (int number = 0; number < 11; number++) {
        MPI_Barrier(MPI_COMM_WORLD);
        const double begin = MPI_Wtime();
        if (operation == 0) MPI_Allgather(own, numel / world, MPI_FLOAT, whole, numel / world, MPI_FLOAT, MPI_COMM_WORLD);
        if (operation == 1) MPI_Reduce_scatter_block(whole, own, numel / world, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        if (operation == 2) MPI_Allreduce(MPI_IN_PLACE, whole, numel, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        double took = MPI_Wtime() - begin;
        MPI_Allreduce(MPI_IN_PLACE, &took, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
        if (number >= 2) times[number - 2] = took;
      }
      qsort(times, 9, sizeof(double), ascending);
      const double moved = operation == 1 ? bytes + (double)bytes / world : 2.0 * bytes;
      if (rank == 0) {
        printf("{\"system\": \"Open MPI\", \"operation\": \"%s\", \"world\": %d, \"bytes\": %ld, \"ms\": %g, \"gb_per_s\": %g}\n", names[operation],
               world, bytes, 1e3 * times[4], world * moved / times[4] / 1e9);
      }
    }
    free(whole);
    free(own);
  }
  MPI_Finalize();
  return 0;
}
