"""Reads every #include of the sources and fails if a room of the house looks into one that it may not know, directly or through other headers.

It states in full what docs/architecture.md says of the order of rooms. A room may use itself and the rooms named beside it. The inner rooms of comm
and shard are for the files that are named beside them, and for nobody else.
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
}
OUTSIDE = {"testing"}  # tests stand outside of the house
# What nobody but these may see, also through a header. Headers that users include never do.
INNER = {
    "comm/host/": ("comm/host/", "comm/shm/", "comm/self/loopback_link", "comm/backend/", "comm/gloo/", "shard/unit/"),
    "comm/shm/": ("comm/shm/",),
    "comm/backend/": ("comm/backend/", "comm/gloo/"),
    "comm/gloo/": ("comm/gloo/",),
    "comm/self/loopback_link": ("comm/self/loopback_link",),
    "shard/unit/": ("shard/unit/", "shard/paging/"),
    "shard/paging/": ("shard/unit/", "shard/paging/"),
}
INCLUDE = re.compile(r'#include\s+["<](tessera/[^">]+|\.[^">]*)[">]')


def includes_of(root):
    """What each file includes of ours, with the number of the line."""
    found = {}
    for path in sorted((root / "tessera").rglob("*")):
        if path.suffix not in {".h", ".cpp"} or path.name.endswith("_test.cpp"):
            continue
        lines = enumerate(path.read_text().splitlines(), 1)
        found[path.relative_to(root).as_posix()] = [(number, match.group(1)) for number, line in lines if (match := INCLUDE.search(line))]
    return found


def reachable(includes, start):
    """Every header that a file sees, with the chain of headers by which it does."""
    chains = {start: ()}
    waiting = [start]
    while waiting:
        file = waiting.pop()
        for _, header in includes.get(file, ()):
            if header not in chains:
                chains[header] = (*chains[file], header)
                waiting.append(header)
    del chains[start]
    return chains


def room_of(path):
    return path.split("/")[1]


def complaints(root):
    includes = includes_of(root)
    for file, own in includes.items():
        if file.count("/") == 1:
            yield from inner_rooms(file, reachable(includes, file))  # the umbrella header
            continue
        room = room_of(file)
        if room in OUTSIDE:
            continue
        if room not in ROOMS:
            yield f"{file}: the room {room} is in no line of the table; add it there and in docs/architecture.md"
            continue
        for number, header in own:
            if not header.startswith("tessera/") or header.count("/") == 1:
                yield f"{file}:{number}: includes start with tessera/ and name a room (the umbrella header is for programs)"
        chains = reachable(includes, file)
        for header, chain in chains.items():
            if header.count("/") > 1 and room_of(header) not in ROOMS[room] | {room}:
                yield f"{file}: {room} may not know {room_of(header)}: {' -> '.join(chain)}"
        yield from inner_rooms(file, chains)


def inner_rooms(file, chains):
    """A source file may look into the inner rooms of its own room; a header that anybody may include must not."""
    place = file.removeprefix("tessera/")
    for header, chain in chains.items():
        for inner, friends in INNER.items():
            if not header.startswith("tessera/" + inner) or place.startswith(friends):
                continue
            at_home = place.split("/")[0] == inner.split("/")[0] and place.endswith(".cpp")
            # A friend in between, like a unit that uses comm's host transports, is no reason to complain of who may see that friend.
            through_friend = any(step.removeprefix("tessera/").startswith(friends) for step in chain[:-1]) and place.split("/")[0] == chain[0].split("/")[1]
            if not at_home and not (through_friend and place.endswith(".cpp")):
                yield f"{file}: {header} is in an inner room: {' -> '.join(chain)}"


def selftest(tmp):
    """The check itself must be able to fail."""
    def write(path, *headers):
        (tmp / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp / path).write_text("".join(f'#include "{header}"\n' for header in headers))

    write("tessera/base/bad.h", "tessera/comm/communicator.h")
    write("tessera/shard/bad.cpp", "tessera/comm/shm/shared_memory_link.h", "tessera/tessera.h")
    write("tessera/shard/top.h", "tessera/shard/unit/unit.h")
    write("tessera/shard/unit/unit.h", "tessera/comm/host/envelope.h")
    write("tessera/shard/good.cpp", "tessera/shard/unit/unit.h")
    write("tessera/optim/through.cpp", "tessera/shard/top.h")
    found = list(complaints(tmp))
    for words in ("base/bad.h: base may not know comm", "bad.cpp: tessera/comm/shm", "bad.cpp:2: includes start with", "top.h: tessera/shard/unit",
                  "optim/through.cpp: tessera/shard/unit/unit.h is in an inner room: tessera/shard/top.h -> tessera/shard/unit/unit.h"):
        assert any(words in complaint for complaint in found), (words, found)
    assert not any("good.cpp" in complaint for complaint in found), found


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        selftest(pathlib.Path(folder))
    wrong = list(complaints(pathlib.Path(sys.argv[1])))
    print("\n".join(wrong) or "every include looks the allowed way")
    sys.exit(1 if wrong else 0)
