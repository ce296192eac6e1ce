"""What the tests that start jobs share: conditions, free ports, losses, an environment without other launchers, and a loop over tests."""
import json
import os
import re
import shutil
import socket
import time

# What another launcher around a test has set would count for its ranks.
OTHERS = re.compile(r"(OMPI|PMIX?|MPI|MV2_COMM_WORLD|SLURM|TORCHELASTIC|MASTER)_|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|"
                    r"GLOO_|TESSERA_(SECRET|STORE|TRANSPORT|HOST_ID|SILENCE_LIMIT)")
ENVIRONMENT = {name: value for name, value in os.environ.items() if not OTHERS.match(name)}
# Before a command: the process ends with this one, however this one ends.
BOUND = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
TESTS = {}


def test(function):
    TESTS[function.__name__] = function
    return function


def expect(condition, what):
    if not condition:
        raise AssertionError(what)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def losses_in(file):
    """As they are printed: two numbers that differ in the last digit are not the same loss. A line that is being written is left out."""
    rows = [json.loads(line, parse_float=str) for line in file.read_text().splitlines() if line.endswith("}")]
    return [row["loss"] for row in rows if "loss" in row]


def run_tests(picked, needed=(), after_each=lambda: None):
    """Runs the tests whose names contain a text of `picked`, and those that they need; all, if none is picked. Returns whether one failed."""
    passed = failed = 0
    for name, function in TESTS.items():
        if picked and name not in needed and not any(part in name for part in picked):
            continue
        began = time.monotonic()
        try:
            function()
        except Exception as error:  # of any kind: the others are to run
            failed += 1
            print(f"FAILED  {name}: {error}", flush=True)
        else:
            passed += 1
            print(f"ok      {name} in {time.monotonic() - began:.1f} s", flush=True)
        finally:
            after_each()
    print(f"{passed} passed, {failed} failed")
    return failed > 0
