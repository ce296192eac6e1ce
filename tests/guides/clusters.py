"""Runs the job files of examples/clusters on this host: two nodes of two ranks, with stand-ins for what a cluster has.

clusters.py ROOT BUILD_BIN FILE

The stand-ins are `srun`, which starts a command once for each node, `mpirun`, which adds the number of ranks, and `scontrol`. The real program
`mnist` gets four steps. The file for Kubernetes is parsed, and its command runs once for each of two pods.
"""
import os
import pathlib
import shutil
import stat
import subprocess
import sys
import tempfile

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
from running import expect, free_port

ROOT, BIN = (pathlib.Path(argument).resolve() for argument in sys.argv[1:3])
FILE = ROOT / "examples/clusters" / sys.argv[3]
STAND_INS = {
    "scontrol": '[ "$*" = "show hostnames node[0-1]" ] && echo localhost && echo node1',
    "srun": 'export SLURM_STEP_NUM_TASKS=2; SLURM_NODEID=1 SLURM_PROCID=1 "$@" & SLURM_NODEID=0 SLURM_PROCID=0 "$@" && wait $!',
    "mpirun": 'exec {mpirun} --oversubscribe -n 2 "$@"',
    "mnist": 'exec {bin}/mnist "$@" --max-steps 4',
    "tessera": 'exec {bin}/tessera "$@"',
}
SLURM = {"SLURM_JOB_NODELIST": "node[0-1]", "SLURM_NNODES": "2", "SLURM_SUBMIT_DIR": ".", "SLURM_CPUS_ON_NODE": "2", "SLURM_NTASKS_PER_NODE": "2"}


def run(commands, environment, folder):
    """Runs commands at the same time, and returns what they print."""
    running = [subprocess.Popen(command, env=environment | more, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True) for command, more in commands]
    said = [process.communicate(timeout=300)[0] for process in running]
    print("\n".join(said))
    expect(not any(process.returncode for process in running), f"ended with {[process.returncode for process in running]}")
    return "\n".join(said)


def pods(folder):
    """The command of each of two pods of the job, which meet at this host."""
    import yaml
    service, job = yaml.safe_load_all(FILE.read_text())
    pod = job["spec"]["template"]["spec"]
    name = job["metadata"]["name"]
    expect(service["spec"]["selector"] == {"job-name": name} and service["metadata"]["name"] == pod["subdomain"], "the service leads to other pods")
    expect(job["spec"]["completionMode"] == "Indexed" and job["spec"]["completions"] == job["spec"]["parallelism"], "not every pod runs at once")
    container, = pod["containers"]
    text, = container["args"]
    for there, here in ((f"--nnodes {job['spec']['completions']}", "--nnodes 2"), (f"{name}-0.{pod['subdomain']}:29500", f"127.0.0.1:{free_port()}"),
                        ("s3://bucket", str(folder / "run"))):
        expect(there in text, f"the command does not say {there}")
        text = text.replace(there, here)
    return [([*container["command"], text], {"JOB_COMPLETION_INDEX": str(index)}) for index in range(2)]


def main():
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        there = {"mpirun": shutil.which("mpirun.openmpi") or shutil.which("mpirun"), "bin": BIN}
        for name, text in STAND_INS.items():
            (folder / name).write_text("#!/bin/sh\n" + text.format(**there) + "\n")
            (folder / name).chmod(stat.S_IRWXU)
        environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1",
                                    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "TESSERA_SECRET": "of this test"}
        if FILE.suffix == ".yaml":
            said = run(pods(folder), environment, folder)
        else:
            script = folder / FILE.name
            script.write_text(FILE.read_text().replace("29500", str(free_port())))
            said = run([(["bash", script], SLURM | {"TESSERA_BIN": str(folder), "PREFIX": str(folder / "run/mnist")})], environment, folder)
            expect("slow:" in said, "the speed of the ranks is not measured")
        expect((folder / "run/mnist-step-000004").exists(), "there is no checkpoint of the fourth step")


if __name__ == "__main__":
    main()
