#!/bin/bash
# A job of Slurm whose ranks Open MPI starts. Submit it with sbatch; submitted again, it resumes. MPICH's mpirun takes no -x: it passes the
# whole environment on.
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=2
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --open-mode=append

set -euo pipefail
bin=${TESSERA_BIN:-$HOME/tessera/build/bin}
prefix=${PREFIX:-$SLURM_SUBMIT_DIR/run/mnist} # on storage that all nodes share

TESSERA_SECRET=$(openssl rand -hex 16)
read -r MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_PORT=29500
OMP_NUM_THREADS=$((SLURM_CPUS_ON_NODE / SLURM_NTASKS_PER_NODE))
export TESSERA_SECRET MASTER_ADDR MASTER_PORT OMP_NUM_THREADS
launch=(mpirun -x TESSERA_SECRET -x MASTER_ADDR -x MASTER_PORT -x OMP_NUM_THREADS)

"${launch[@]}" "$bin/tessera" test --speed
"${launch[@]}" "$bin/mnist" --fake-data --num-epochs 10 --ckpt-prefix "$prefix" --resume --save-steps 100 --keep 3
