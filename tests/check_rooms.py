"""Reads every #include of the sources and fails if a room of the house looks into one that it may not know.

It states in full what docs/architecture.md says in its order of rooms and its last column: a room may use itself and the rooms named beside it.
"""
import pathlib
import re
import sys

ROOMS = {
    "base": set(),
    "comm": {"base"},
    "shard": {"base", "comm"},
    "optim": {"base", "comm", "shard"},
    "nn": {"base", "comm", "shard"},
    "checkpoint": {"base", "comm", "shard", "optim", "nn"},
    "data": {"base", "comm"},
    "models": {"base", "nn"},
    "train": {"base", "comm", "shard", "optim", "nn", "checkpoint", "data"},
    "xla": {"base", "comm", "shard", "optim"},
    "cli": {"base", "comm", "shard", "optim", "nn", "checkpoint", "data", "train", "xla"},
    "testing": None,  # tests stand outside the house
}
# Which transport a program talks over is for comm to know: the rooms below it see the interface.
HIDDEN = re.compile(r"tessera/comm/(host/(host_transport|link|queue|envelope|reducer)|gloo|shm|self/loopback_link)")
INCLUDE = re.compile(r'#include\s+["<](tessera/(\w+)/[^">]+|tessera/tessera\.h|\.[^">]*)[">]')


def complaints(root):
    for path in sorted((root / "tessera").rglob("*")):
        if path.suffix not in {".h", ".cpp"} or path.name.endswith("_test.cpp"):
            continue
        room = path.relative_to(root / "tessera").parts[0]
        if path.parent == root / "tessera":
            continue  # the umbrella header
        if room not in ROOMS:
            yield f"{path}: the room {room} is in no line of the table; add it there and in docs/architecture.md"
            continue
        if ROOMS[room] is None:
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            found = INCLUDE.search(line)
            if not found:
                continue
            used = found.group(2)
            where = f"{path.relative_to(root)}:{number}"
            if used is None:
                yield f"{where}: includes start with tessera/ and name a room (the umbrella header is for programs)"
            elif used != room and used not in ROOMS[room]:
                yield f"{where}: {room} may not know {used}"
            elif room != "comm" and HIDDEN.match(found.group(1)):
                yield f"{where}: {found.group(1)} is private to comm"


def selftest(tmp):
    """The check itself must be able to fail."""
    (tmp / "tessera/base").mkdir(parents=True)
    (tmp / "tessera/base/bad.h").write_text('#include "tessera/comm/communicator.h"\n')
    (tmp / "tessera/shard").mkdir()
    (tmp / "tessera/shard/bad.cpp").write_text('#include "tessera/comm/shm/shared_memory_link.h"\n#include "tessera/tessera.h"\n')
    found = list(complaints(tmp))
    assert len(found) == 3, found


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        selftest(pathlib.Path(folder))
    wrong = list(complaints(pathlib.Path(sys.argv[1])))
    print("\n".join(wrong) or "every include looks the allowed way")
    sys.exit(1 if wrong else 0)
