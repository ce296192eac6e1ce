"""Strangers around a job on this host: port scanners, who says again what a rank has said, and who looks for the secret.

strangers.py BUILD_BIN [NAME...]

NAME picks the tests whose names contain it.
"""
import os
import pathlib
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
from running import BOUND, ENVIRONMENT, expect, free_port, losses_in, run_tests, test

BIN = pathlib.Path(sys.argv[1]).absolute()
PICKED = sys.argv[2:]
TESSERA, MNIST = BIN / "tessera", BIN / "mnist"
HELLO, NUMBER, PROOF = b"tessera store 3\n", 32, 32
STARTED = []


def start(command, **variables):
    environment = ENVIRONMENT | {"OMP_NUM_THREADS": "1"} | {name: str(value) for name, value in variables.items()}
    STARTED.append(subprocess.Popen([*BOUND, *map(str, command)], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                    stderr=subprocess.STDOUT, text=True, errors="replace"))
    return STARTED[-1]


def kill_started():
    while STARTED:
        STARTED.pop().kill()


def output_of(process, status=0):
    said = process.communicate(timeout=250)[0]
    expect(status is None or process.returncode == status, f"ended with status {process.returncode}, not {status}:\n{said}")
    return said


def below(pid):
    """The processes that this one has started, and those that they have."""
    for task in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            yield int(child)
            yield from below(child)


def ports_of(pids):
    """Where these processes listen."""
    own = set()
    for pid in pids:
        for entry in pathlib.Path(f"/proc/{pid}/fd").iterdir():
            own.add(os.readlink(entry))
    rows = [line.split() for line in pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own}


def racing(look, *arguments):
    """The answer of a look into /proc, where processes come and go."""
    try:
        return look(*arguments)
    except OSError:
        return set()


def receive(peer, count):
    received = b""
    while len(received) < count and (some := peer.recv(count - len(received))):
        received += some
    return received


def losses_among(crowd):
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "losses.jsonl")
        job = start([TESSERA, "launch", "-n", 3, "-q", MNIST, "--fake-data", "--num-epochs", 8, "--batch-size", 100, "--log-steps", 1, "--metrics", file],
                    TESSERA_TRANSPORT="gloo")
        crowd(job)
        output_of(job)
        return losses_in(file)


@test
def a_crowd_changes_nothing():
    """Neither while ranks connect nor afterwards. gloo keeps each connection that it accepts, so it must soon accept none."""
    words = [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01", b"SSH-2.0-scan\r\n", HELLO, HELLO + b"0" * NUMBER + b"1" * PROOF, random.randbytes(100)]
    silent, met, deaf = [], {}, set()

    def crowd(job):
        while job.poll() is None and len(deaf) < 3:
            for port in racing(lambda: ports_of(set(below(job.pid)))):
                for turn in range(20):
                    peer = socket.socket()
                    peer.settimeout(0.2)
                    try:
                        peer.connect(("127.0.0.1", port))
                        peer.sendall(words[turn % len(words)])
                        met[port] = met.get(port, 0) + 1
                    except TimeoutError:
                        deaf.add(port)
                        break
                    except OSError:
                        break
                    if turn % 2:
                        silent.append(peer)
                        del silent[:-300]

    undisturbed = losses_among(lambda job: None)
    disturbed = losses_among(crowd)
    expect(len(undisturbed) > 10 and disturbed == undisturbed, f"the losses are\n{disturbed}\nbut undisturbed\n{undisturbed}")
    expect(len(deaf) == 3, f"3 ranks over gloo, but of the ports {met} these dropped connections: {deaf}")


class Recorder:
    """Passes on what the processes at both ends of a port say, and keeps it."""

    def __init__(self, to, on_words=lambda words: None):
        self.to, self.on_words = to, on_words
        self.heard = b""
        self.lock = threading.Lock()
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port = self.server.getsockname()[1]
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while True:
            near = self.server.accept()[0]
            try:
                far = socket.create_connection(("127.0.0.1", self.to))
            except OSError:  # nobody is there yet
                near.close()
                continue
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self.pass_on, args=(one, other, one is near), daemon=True).start()

    def pass_on(self, one, other, is_client):
        words = b""
        try:
            while some := one.recv(1 << 16):
                words += some if is_client else b""
                with self.lock:
                    self.heard += some
                other.sendall(some)
                if is_client:
                    self.on_words(words)
            other.shutdown(socket.SHUT_WR)
        except OSError:
            one.close()
            other.close()


@test
def what_a_rank_has_said_opens_nothing():
    """The handshake of a real rank, said again to the same store while its job runs."""
    port, answers = free_port(), []

    def say_again(words):
        if answers or len(words) < len(HELLO) + NUMBER + PROOF:
            return
        with socket.create_connection(("127.0.0.1", port)) as peer:
            peer.settimeout(20)
            peer.sendall(words[:len(HELLO) + NUMBER])
            receive(peer, len(HELLO) + NUMBER)
            peer.sendall(words[len(HELLO) + NUMBER:])
            answers.append(receive(peer, 1000))

    recorder = Recorder(port, say_again)
    common = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "TESSERA_SECRET": "sesame-of-ranks"}
    ranks = [start([TESSERA, "test"], RANK=0, MASTER_PORT=port, **common), start([TESSERA, "test"], RANK=1, MASTER_PORT=recorder.port, **common)]
    said = [output_of(rank) for rank in ranks]
    expect(answers == [b"tessera refused\n"], f"the store has answered {answers}")
    expect("refused a process with another TESSERA_SECRET" in said[0], f"rank 0 does not say that somebody was refused:\n{said[0]}")
    expect(HELLO in recorder.heard and b"sesame-of-ranks" not in recorder.heard, "the secret has travelled")


def everywhere():
    """All command lines of this host."""
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        yield racing(lambda: (folder / "cmdline").read_bytes().decode(errors="replace")) or ""


def secret_in_environment(pid):
    variables = (pathlib.Path(f"/proc/{pid}/environ").read_bytes()).decode(errors="replace").split("\0")
    return {text.split("=", 1)[1] for text in variables if text.startswith("TESSERA_SECRET=") and text != "TESSERA_SECRET="}


@test
def the_secret_is_nowhere():
    """Two launchers and their ranks, which log all they can and describe their environment: no secret in an output, a log, a command line, or
    between the launchers."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "secret")
        file.touch(mode=0o600)
        file.write_text("sesame-of-launchers\n")
        recorder = Recorder(free_port())
        program = 'tessera=$1; shift; "$tessera" env && "$tessera" env --json && "$tessera" test && test "$RANK" = 0'
        nodes = [start([TESSERA, "launch", "-n", 1, "--nnodes", 2, "--node-rank", node, "--rdzv-endpoint",
                        f"127.0.0.1:{port}", "--log-dir", f"{folder}/logs{node}", "sh", "-c", program, "sh", TESSERA],
                       TESSERA_SECRET_FILE=file, TESSERA_LOG="debug", TESSERA_HOST_ID=f"node{node}")
                 for node, port in ((0, recorder.to), (1, recorder.port))]
        of_ranks, lines = set(), set()
        while any(node.poll() is None for node in nodes):
            for node in nodes:
                for pid in racing(lambda: set(below(node.pid))):
                    of_ranks |= racing(secret_in_environment, pid)
            lines |= set(everywhere())
            time.sleep(0.02)
        said = [output_of(node, status=1) for node in nodes]
        logs = [log.read_text(errors="replace") for log in pathlib.Path(folder).glob("logs*/**/*") if log.is_file()]
        expect(len(of_ranks) == 1 and "sesame-of-launchers" not in of_ranks, f"the ranks have these secrets: {of_ranks}")
        expect(any("(set, not shown)" in text for text in said), f"`tessera env` does not show that a secret is set:\n{said[0]}")
        expect(any(f"{TESSERA} test" in line.replace("\0", " ") for line in lines), "no command line of a rank was seen")
        for secret in of_ranks | {"sesame-of-launchers"}:
            expect(not any(secret in text for text in said + logs), f"the secret {secret} is in what the job says")
            expect(not any(secret in line for line in lines), f"the secret {secret} is on a command line")
            expect(recorder.heard and secret.encode() not in recorder.heard, f"the secret {secret} travels between launchers")


@test
def a_wrong_secret_is_not_repeated():
    port = free_port()
    common = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TESSERA_LOG": "debug"}
    first = start([TESSERA, "test"], RANK=0, TESSERA_SECRET="sesame-of-ranks", **common)
    said = output_of(start([TESSERA, "test"], RANK=1, TESSERA_SECRET="guessed-by-a-stranger", **common), status=None)
    first.kill()
    said += output_of(first, status=None)
    expect("whose TESSERA_SECRET is another one; set the same one for every rank" in said, f"the error is missing in:\n{said}")
    expect("sesame" not in said and "guessed" not in said, f"an error repeats a secret:\n{said}")


if __name__ == "__main__":
    sys.exit(run_tests(PICKED, after_each=kill_started))
