#!/bin/bash
# A job of Slurm: srun starts a launcher on each node, which starts the ranks of that node. Submit it with sbatch; submitted again, it resumes.
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append

set -euo pipefail
bin=${TESSERA_BIN:-$HOME/tessera/build/bin}
prefix=${PREFIX:-$SLURM_SUBMIT_DIR/run/mnist} # on storage that all nodes share
ranks=2                                       # of each node, such as one for each socket

TESSERA_SECRET=$(openssl rand -hex 16) # srun passes it on to every task
export TESSERA_SECRET
read -r node0 < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
launch=("$bin/tessera" launch -n "$ranks" --nnodes "$SLURM_NNODES"
  --rdzv-endpoint "$node0:29500")

srun "${launch[@]}" "$bin/tessera" test --speed
srun "${launch[@]}" --max-restarts 3 \
  "$bin/mnist" --fake-data --num-epochs 10 --ckpt-prefix "$prefix" --resume --save-steps 100 --keep 3
