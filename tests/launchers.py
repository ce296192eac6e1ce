"""Starts one training by every launcher that a rank can be started with, and compares the losses digit by digit.

launchers.py BUILD_BIN PYTHON [--long] [NAME...]

PYTHON has torch, for torchrun. NAME picks the tests whose names contain it. --long adds a Slurm of two nodes on this host,
which is made in a temporary folder and is gone afterwards. There a program that is missing is a failure.
"""
import concurrent.futures
import contextlib
import getpass
import os
import pathlib
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

from running import ENVIRONMENT, expect, free_port, losses_in, run_tests, test

BIN, PYTHON = (pathlib.Path(argument).absolute() for argument in sys.argv[1:3])
LONG = "--long" in sys.argv[3:]
PICKED = [argument for argument in sys.argv[3:] if argument != "--long"]
TESSERA, MNIST = BIN / "tessera", BIN / "mnist"
TRAINING = [MNIST, "--fake-data", "--num-epochs", 1, "--batch-size", 300, "--log-steps", 1, "--metrics"]
MPIRUN = [shutil.which("mpiexec.openmpi") or "mpirun", "--oversubscribe"]
HYDRA = ["mpiexec.hydra"]
TORCHRUN = [PYTHON, "-m", "torch.distributed.run", "--no-python"]

ENVIRONMENT |= {"OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
ENVIRONMENT["PATH"] += ":/usr/sbin"  # where Slurm's daemons are, and where not everybody looks

EXPECTED = {}  # by how many ranks


def long_test(function):
    return test(function) if LONG else function


def run(command, status=0, **variables):
    """Runs a command, whose output it gives."""
    environment = ENVIRONMENT | {name: str(value) for name, value in variables.items()}
    done = subprocess.run([str(word) for word in command], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, errors="replace", timeout=1000)
    expect(done.returncode == status, f"ended with status {done.returncode}, not {status}:\n{done.stdout}")
    return done.stdout


def losses(launcher, **variables):
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "losses.jsonl")
        run([*launcher, *TRAINING, file], TMPDIR=folder, **variables)
        return losses_in(file)


def expect_contradiction(launcher, theirs, **variables):
    """Three ranks, while the environment says that there are two: an error that names both. Which rank is the first to say it is open."""
    with tempfile.TemporaryDirectory() as folder:
        said = run([*launcher, *TRAINING, f"{folder}/losses.jsonl"], status=1, TMPDIR=folder, RANK=0, WORLD_SIZE=2, **variables)
    expect(re.search(f"RANK=0 of WORLD_SIZE=2, but {theirs}", said), f"'{theirs}' is not said in:\n{said}")


def expect_losses(found, ranks=2):
    """Those that ranks have under `tessera launch`."""
    expect(found == EXPECTED[ranks], f"the losses are\n{found}\nbut under tessera launch\n{EXPECTED[ranks]}")


@test
def tessera_launch():
    """Every other launcher is compared with this one."""
    for ranks, steps in ((2, 10), (1, 20)):
        EXPECTED[ranks] = losses([TESSERA, "launch", "-n", ranks])
        expect(len(EXPECTED[ranks]) == steps, f"{ranks} ranks say {len(EXPECTED[ranks])} losses")
    expect(EXPECTED[1][:10] != EXPECTED[2], "one rank has the losses of two")


@test
def mpirun():
    """MPI's launchers say no port, and other tests may use the default one."""
    expect_losses(losses([*MPIRUN, "-n", 2], MASTER_PORT=free_port()))


def two_jobs_at_once(launcher, **variables):
    """Two users of one host know nothing of each other, so neither sets a port."""
    with concurrent.futures.ThreadPoolExecutor(2) as both:
        for job in [both.submit(losses, launcher, **variables) for _ in range(2)]:
            expect_losses(job.result())


def over_mpi(launcher):
    """Two ranks add two numbers, which have one sum in any order."""
    expect_losses(losses([*launcher, "-n", 2], MASTER_PORT=free_port(), TESSERA_TRANSPORT="mpi"))


@test
def mpirun_over_mpi():
    over_mpi(MPIRUN)


@test
def hydra_over_mpi():
    over_mpi(HYDRA)


@test
def two_jobs_of_mpirun_at_once():
    two_jobs_at_once([*MPIRUN, "-n", 2])


@test
def torchrun():
    expect_losses(losses([*TORCHRUN, "--standalone", "--nproc-per-node", 2]))


@test
def mpirun_contradicts_left_over_variables():
    expect_contradiction([*MPIRUN, "-n", 3], "OMPI_COMM_WORLD_RANK=[012] of OMPI_COMM_WORLD_SIZE=3")


# An emulation: what Slurm 22.05 sets, without Slurm.
SLURM_JOB = {"SLURM_JOB_ID": 7, "SLURM_NTASKS": 2, "SLURM_NPROCS": 2, "SLURM_NNODES": 1, "SLURM_NODEID": 0, "SLURM_NODELIST": "n1"}


@test
def emulated_slurm_step():
    step = SLURM_JOB | {"SLURM_STEP_ID": 0, "SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_NUM_NODES": 1, "SLURM_STEP_TASKS_PER_NODE": 2,
                        "SLURM_STEP_NODELIST": "n1", "MASTER_PORT": free_port()}
    both = 'SLURM_PROCID=1 SLURM_LOCALID=1 "$@" & SLURM_PROCID=0 SLURM_LOCALID=0 "$@" && wait $!'
    expect_losses(losses(["sh", "-c", both, "sh"], **step))


@test
def emulated_slurm_batch_script_is_a_lone_process():
    expect_losses(losses([], SLURM_PROCID=0, SLURM_LOCALID=0, **SLURM_JOB), ranks=1)


@test
def hydra():
    expect_losses(losses([*HYDRA, "-n", 2], MASTER_PORT=free_port()))


@test
def hydra_contradicts_left_over_variables():
    expect_contradiction([*HYDRA, "-n", 3], "PMI_RANK=[012] of PMI_SIZE=3")


class Slurm:
    """A real Slurm with two nodes on this host. Their names are addresses, so that a list of nodes leads to them as on a cluster."""

    def __init__(self):
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self.variables = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self.daemons = []
        self.started = False

    def start(self):
        ports, user, host = [free_port() for _ in range(3)], getpass.getuser(), socket.gethostname().split(".")[0]
        (self.folder / "slurm.conf").write_text(f"""
            ClusterName=test
            SlurmctldHost={host}(127.0.0.1)
            SlurmctldPort={ports[0]}
            NodeName=127.0.0.[2-3] NodeHostname={host} Port={ports[1]},{ports[2]} CPUs=2
            PartitionName=all Nodes=ALL Default=YES OverSubscribe=FORCE
            # Nobody but this host and this user.
            CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
            AuthType=auth/munge
            AuthInfo=socket={self.folder}/munge
            CredType=cred/munge
            SlurmUser={user}
            SlurmdUser={user}
            StateSaveLocation={self.folder}/state
            SlurmdSpoolDir={self.folder}/spool-%n
            SlurmctldPidFile={self.folder}/slurmctld.pid
            SlurmdPidFile={self.folder}/slurmd-%n.pid
            # No control groups, which a container may not have (so does cgroup.conf), and no mail.
            ProctrackType=proctrack/linuxproc
            TaskPlugin=task/none
            MailProg=/bin/true
            """.replace("            ", ""))
        version = tuple(map(int, re.search(r"(\d+)\.(\d+)", self.ask("slurmd", "-V")).groups()))
        (self.folder / "cgroup.conf").write_text(f"CgroupPlugin={'disabled' if version >= (23, 11) else 'cgroup/v1'}\n")
        (self.folder / "state").mkdir()
        (self.folder / "key").touch(mode=0o600)
        (self.folder / "key").write_bytes(secrets.token_bytes(128))
        # Forced, because it wants a folder that everybody may enter.
        self.daemon("munged", "--foreground", "--force", f"--socket={self.folder}/munge", f"--key-file={self.folder}/key",
                    f"--pid-file={self.folder}/munged.pid", f"--seed-file={self.folder}/seed", f"--log-file={self.folder}/munged.log")
        self.wait_for(lambda: (self.folder / "munge").exists())
        self.daemon("slurmctld", "-D")
        self.daemon("slurmd", "-D", "-N", "127.0.0.2")
        self.daemon("slurmd", "-D", "-N", "127.0.0.3")
        self.wait_for(lambda: self.ask("sinfo", "-h", "-o", "%D %t") == "2 idle")
        self.started = True

    def daemon(self, *command):
        with open(self.folder / f"{command[0]}-{len(self.daemons)}.out", "w") as out:
            # It ends with this process, however that ends.
            self.daemons.append(subprocess.Popen(["setpriv", "--pdeathsig", "TERM", *command], env=ENVIRONMENT | self.variables,
                                                 stdin=subprocess.DEVNULL, stdout=out, stderr=out))

    def ask(self, *command):
        return subprocess.run(command, env=ENVIRONMENT | self.variables, capture_output=True, text=True, timeout=300).stdout.strip()

    def wait_for(self, condition):
        deadline = time.monotonic() + 60
        while not condition():
            expect(all(daemon.poll() is None for daemon in self.daemons), f"a daemon has ended:\n{self.said()}")
            expect(time.monotonic() < deadline, f"Slurm is not ready after 60 s:\n{self.said()}")
            time.sleep(0.05)

    def said(self):
        return "\n".join(f"{file.name}: {file.read_text(errors='replace')[-2000:]}" for file in sorted(self.folder.glob("*.out")))

    def stop(self):
        """Gives what did not end by itself, which is killed."""
        if self.started:
            self.ask("scancel", "--user", getpass.getuser())
            self.ask("scontrol", "shutdown")
        if self.daemons:
            self.daemons[0].terminate()
        deadline = time.monotonic() + 10
        while list(self.processes()) and self.started and time.monotonic() < deadline:
            for daemon in self.daemons:
                daemon.poll()
            time.sleep(0.05)
        left = list(self.processes())
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for daemon in self.daemons:
            daemon.wait()
        self.daemons, self.started = [], False
        shutil.rmtree(self.folder, ignore_errors=True)
        return left

    def processes(self):
        """Everything that belongs to this Slurm knows its configuration."""
        for folder in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"SLURM_CONF={self.folder}/".encode() in (folder / "environ").read_bytes():
                    yield int(folder.name)

    def run(self, *command, **more):
        expect(self.started, "Slurm did not start")
        return run(command, **self.variables, **more)

    def losses(self, *launcher):
        expect(self.started, "Slurm did not start")
        return losses(launcher, **self.variables)

    def batch(self, *lines):
        """Runs a batch script for two tasks on two nodes, and gives its output."""
        script, output = self.folder / "script", self.folder / "script.out"
        script.write_text("\n".join(["#!/bin/sh -e", *lines, "echo the end", ""]))
        job = self.run("sbatch", "--parsable", "--nodes", 2, "--ntasks", 2, "--output", output, script).strip()
        self.wait_for(lambda: not self.ask("squeue", "--noheader", "--jobs", job))
        said = output.read_text()
        expect(said.endswith("the end\n"), f"the batch script fails:\n{said}")
        return said

    def training(self, name):
        return " ".join(map(str, [*TRAINING, self.folder / f"{name}.jsonl"]))


SLURM = Slurm() if LONG else None


@long_test
def slurm_starts():
    SLURM.start()


@long_test
def srun_on_one_node():
    expect_losses(SLURM.losses("srun", "--nodes", 1, "--ntasks", 2))


@long_test
def srun_on_two_nodes():
    expect_losses(SLURM.losses("srun", "--nodes", 2, "--ntasks", 2))


@long_test
def srun_with_pmi2():
    """Many clusters have it switched on for all steps, which then have the variables of MPICH, too."""
    expect_losses(SLURM.losses("srun", "--mpi", "pmi2", "--nodes", 2, "--ntasks", 2))


@long_test
def two_jobs_of_srun_at_once():
    for mpi in ("none", "pmi2"):
        two_jobs_at_once(["srun", "--mpi", mpi, "--nodes", 2, "--ntasks", 2], **SLURM.variables)


@long_test
def srun_contradicts_left_over_variables():
    expect(SLURM.started, "Slurm did not start")
    expect_contradiction(["srun", "--overcommit", "--ntasks", 3], "SLURM_PROCID=[012] of SLURM_STEP_NUM_TASKS=3", **SLURM.variables)


@long_test
def sbatch_is_a_lone_process_and_its_steps_are_not():
    two = "srun --overlap "
    SLURM.batch(SLURM.training("lone"), f"{two}{SLURM.training('first')} & {two}{SLURM.training('second')}", "wait $!")
    expect_losses(losses_in(SLURM.folder / "lone.jsonl"), ranks=1)
    expect_losses(losses_in(SLURM.folder / "first.jsonl"))
    expect_losses(losses_in(SLURM.folder / "second.jsonl"))


@long_test
def salloc_with_mpirun():
    expect_losses(SLURM.losses("salloc", "--nodes", 1, "--ntasks", 2, "env", f"MASTER_PORT={free_port()}", *MPIRUN, "-n", 2))


@long_test
def srun_starts_tessera_launch():
    expect_losses(SLURM.losses("srun", "--nodes", 2, "--ntasks-per-node", 1, TESSERA, "launch", "-n", 1, "--nnodes", 2, "--rdzv-endpoint",
                               f"127.0.0.2:{free_port()}"))


@long_test
def srun_starts_torchrun():
    torchrun_on_a_node = " ".join(map(str, [*TORCHRUN, "--nproc-per-node 1 --nnodes 2 --node-rank $SLURM_NODEID --master-addr 127.0.0.2",
                                            "--master-port", free_port()]))
    expect_losses(SLURM.losses("srun", "--nodes", 2, "--ntasks-per-node", 1, "sh", "-c", f'exec {torchrun_on_a_node} "$@"', "sh"))


@long_test
def slurm_ends():
    expect(SLURM.started, "Slurm did not start")
    left = SLURM.stop()
    expect(not left, f"{len(left)} processes of Slurm did not end by themselves")


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that Slurm is stopped
    try:
        return run_tests(PICKED, needed=("tessera_launch", "slurm_starts", "slurm_ends"))
    finally:
        if SLURM is not None:
            SLURM.stop()


if __name__ == "__main__":
    sys.exit(main())
