"""Reads every #include of the sources and fails if a room of the house looks into one that it may not know, directly or through other headers.

It states in full what docs/architecture.md says of the order of rooms. A room may use itself and the rooms named beside it. The inner rooms of comm
and shard are for the files that are named beside them, and for nobody else.
"""
import fnmatch
import pathlib
import re
import sys

ROOMS = {
    "base": set(),
    "s3": {"base"},
    "config": {"base"},
    "comm": {"base"},
    "simulate": {"base", "comm"},
    "shard": {"base", "comm", "simulate"},
    "optim": {"base", "comm", "simulate", "shard"},
    "nn": {"base", "comm", "shard"},
    "checkpoint": {"base", "comm", "shard", "optim", "nn"},
    "data": {"base", "comm"},
    "models": {"base", "nn", "shard"},
    "train": {"base", "config", "comm", "simulate", "shard", "optim", "nn", "checkpoint", "data"},
    "llm": {"base", "comm", "shard", "nn", "checkpoint", "data", "models"},
    "vision": {"base", "comm", "data"},
    "xla": {"base", "comm", "shard", "optim"},
    "cli": {"base", "config", "comm", "simulate", "shard", "optim", "nn", "checkpoint", "data", "models", "train", "llm", "xla"},
}
# Of some rooms a room may include these headers only, and what they include.
ONLY = {("models", "shard"): {"tessera/shard/call.h", "tessera/shard/some_ranks.h"}}
# What each package may include. Which files it has stands in cmake/packages.cmake; the core has all others. What the core has to know of another
# package is registered there (checkpoint/adapters.h, train/adapter_settings.h, comm/engines.h, cli/packages.h).
PACKAGES = {
    "core": {"core"},
    "models": {"core", "models"},
    "vision": {"core", "vision"},
    "xla": {"core", "xla"},
    "cli": {"core", "cli"},
    "cli_models": {"core", "cli", "models", "cli_models"},
    "cli_xla": {"core", "cli", "xla", "cli_xla"},
}
# Who may see an inner room, as patterns of paths in which * is a part of one name. A room that is not named beside another one sees it through
# nobody's headers either, unless the header in between is named: optim sees shard/access/, and those headers hide what they are made of.
INNER = {
    "comm/groups/*": ["comm/*/*", "shard/*.cpp", "shard/*/*", "optim/*.cpp", "checkpoint/*.cpp", "checkpoint/live/*", "checkpoint/convert/*", "data/*.cpp",
                      "train/*.cpp"],
    "comm/control/*": ["comm/control/*", "comm/communicator.cpp", "comm/engine.cpp", "comm/init.cpp", "comm/record.cpp", "shard/memory/*"],
    "comm/host/*": ["extending.h", "comm/host/*", "comm/control/*", "comm/shm/*", "comm/self/*", "comm/fake/fake.cpp", "comm/backend/*", "comm/gloo/*", "comm/c10d/*", "comm/mpi/*",
                    "comm/levels/*", "comm/threads/run_ranks.cpp", "comm/engine.*", "comm/engines.*", "comm/init.cpp", "simulate/world.cpp", "shard/memory/*", "cli/launch/nodes.cpp", "cli/env.cpp",
                    "cli/test.cpp"],
    "comm/levels/*": ["comm/levels/*", "comm/threads/run_ranks.cpp", "comm/engine.cpp", "comm/init.cpp", "simulate/world.cpp"],
    "comm/shm/*": ["extending.h", "comm/shm/*", "comm/levels/*.cpp", "comm/c10d/*", "comm/threads/run_ranks.cpp", "comm/engines.cpp"],
    "comm/backend/*": ["comm/backend/*", "comm/gloo/*", "comm/c10d/*", "comm/mpi/*", "comm/init.cpp"],
    "comm/gloo/*": ["comm/gloo/*", "comm/c10d/*", "comm/engines.cpp"],
    "comm/c10d/*": ["comm/c10d/*", "comm/mpi/mpi.cpp", "comm/engines.cpp"],
    "comm/mpi/*": ["comm/mpi/*", "comm/mpi/module/*", "comm/engines.cpp", "comm/init.cpp"],
    "comm/device/*": ["comm/device/*", "comm/c10d/*", "comm/self/*.cpp", "comm/fake/*.cpp", "comm/threads/run_ranks.cpp", "comm/engine.cpp", "comm/init.cpp",
                      "cli/env.cpp"],
    "comm/self/loopback_link.h": ["comm/self/*.cpp", "comm/fake/fake.cpp", "simulate/world.cpp"],
}
# The inner rooms of shard are layers: each knows those before it, and nobody else looks into them but the sources at the top of shard.
LAYERS = {"shard": ["storage", "dispatch", "deferred", "memory", "unit", "gradients", "schedule", "backward", "access", "paging", "activation"],
          "xla": ["pjrt", "graph", "device", "device/lowerings", "communicator"]}
WITHOUT_CIRCLES = {"shard", "comm", "xla"}
for _top, _layers in LAYERS.items():
    for _i, _layer in enumerate(_layers):
        # Headers of access/ are for optimizers and checkpoints, so they hide what they are made of.
        INNER[f"{_top}/{_layer}/*"] = [f"{_top}/*.cpp"] + [f"{_top}/{above}/*" + (".cpp" if above == "access" != _layer else "") for above in _layers[_i:]]
INNER["xla/pjrt/*"] += ["cli/xla/*"]
INNER["shard/access/*"] += ["optim/*.cpp", "nn/*.cpp", "checkpoint/*.cpp", "checkpoint/live/*"]
# What inner rooms may use of the top of their own room: interfaces and options, which rest on nothing but themselves.
PLAIN = {
    "comm": {"operation.h", "calling.h", "traits.h", "transport.h", "work.h", "topology.h", "communicator.h", "engine.h", "record.h", "simulation.h", "trace.h"},
    "shard": {"options.h", "codec.h", "custom_reduction.h", "gradient_sink.h", "write_kind.h", "activation_options.h", "offload.h", "tensors.h", "forward_phase.h",
              "weight_forms.h"},
    "xla": {"options.h", "training.h", "metrics.h", "memory_figures.h"},
}
# Headers that bring all of libtorch, which users would wait for in each file: headers include the parts that they need.
ALL_OF_TORCH = re.compile(r"#include <(torch/(torch|all|extension|nn|optim|data|nn/modules)\.h|ATen/ATen\.h)>")
PICTURE = "```text"  # where the first such block of docs/architecture.md begins
INCLUDE = re.compile(r'#include\s+["<]((?:tessera|tests)/[^">]+|\.[^">]*)[">]')


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
    patterns = files_of_packages(root)
    for file, own in includes.items():
        if file.count("/") == 1:
            yield from inner_rooms(file, reachable(includes, file))  # an umbrella header
            yield from arrows_out(file, own, patterns)
            continue
        room = room_of(file)
        if room not in ROOMS:
            yield f"{file}: the room {room} is in no line of the table; add it there and in docs/architecture.md"
            continue
        for number, header in own:
            if not header.startswith("tessera/") or (header.count("/") == 1 and header != "tessera/version.h"):
                yield f"{file}:{number}: includes start with tessera/ and name a room (the umbrella header is for programs)"
            elif header not in ONLY.get((room, room_of(header)), {header}):
                yield f"{file}:{number}: {room} may not include {header}, but only {', '.join(sorted(ONLY[room, room_of(header)]))}"
        yield from arrows_up(file, own)
        yield from arrows_out(file, own, patterns)
        chains = reachable(includes, file)
        for header, chain in chains.items():
            if header.count("/") > 1 and room_of(header) not in ROOMS[room] | {room}:
                yield f"{file}: {room} may not know {room_of(header)}: {' -> '.join(chain)}"
        yield from inner_rooms(file, chains)
    yield from circles(includes)
    yield from whole_torch(root)


def matches(path, patterns):
    names = path.split("/")
    return any(len(names) == pattern.count("/") + 1 and all(map(fnmatch.fnmatchcase, names, pattern.split("/"))) for pattern in patterns)


def inner_rooms(file, chains):
    """Nobody sees an inner room except the files named beside it, and those who may see such a file."""
    for header, chain in chains.items():
        steps = [step.removeprefix("tessera/") for step in (file, *chain)]
        for inner, friends in INNER.items():
            if matches(steps[-1], [inner]) and not any(matches(step, friends) for step in steps[:-1]):
                yield f"{file}: {header} is in an inner room: {' -> '.join(chain)}"


def whole_torch(root):
    """No header includes all of libtorch."""
    for path in sorted((root / "tessera").rglob("*.h")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if match := ALL_OF_TORCH.match(line):
                yield f"{path.relative_to(root)}:{number}: a header may not include {match.group(1)}, which is slow to compile; include the parts that it needs"


def arrows_up(file, own):
    """No inner room uses what stands at the top of its room and is made of it."""
    place = file.removeprefix("tessera/")
    top = place.split("/")[0]
    if not any(matches(place, [inner]) and inner.startswith(top + "/") for inner in INNER):
        return
    for number, header in own:
        names = header.removeprefix("tessera/").split("/")
        if len(names) == 2 and names[0] == top and names[1] not in PLAIN[top]:
            yield f"{file}:{number}: an inner room of {top} may not use {header}, which stands above it"


def files_of_packages(root):
    """The patterns of each package's files, as CMake has them."""
    text = (root / "cmake/packages.cmake").read_text()
    return {name.lower(): re.sub(r"#.*", "", files).split() for name, files in re.findall(r"set\(TESSERA_(\w+)\s([^)]*)\)", text)}


def arrows_out(file, own, patterns):
    """A package uses those only that it may."""
    def package_of(place):
        return next((name for name in patterns if matches(place, patterns[name])), "core")

    of_file = package_of(file.removeprefix("tessera/"))
    for number, header in own:
        of_header = package_of(header.removeprefix("tessera/"))
        if of_header not in PACKAGES[of_file]:
            yield f"{file}:{number}: the package {of_file} may not include {header}, which is of the package {of_header}"


def circles(includes):
    """Headers that include each other in a circle, their sources counted with them: a reader can't enter one of them alone."""
    pairs = {}
    for file, own in includes.items():
        pairs.setdefault(file.rsplit(".", 1)[0], []).extend((number, header.rsplit(".", 1)[0]) for number, header in own)
    seen = {pair: reachable(pairs, pair) for pair in pairs}
    for pair in sorted(pairs):
        if pair.split("/")[1] not in WITHOUT_CIRCLES:
            continue
        for other in sorted(seen[pair]):
            if pair < other and pair in seen.get(other, ()):
                yield f"{pair}: includes {other}, which includes it, through other files or itself"


def picture(includes):
    """The layers of shard as the code has them, the highest first, each with those that it includes."""
    lines = []
    for top, layers in LAYERS.items():
        uses = {layer: set() for layer in [*layers, ""]}
        for file, own in includes.items():
            names = file.removeprefix("tessera/").split("/")
            layer = "/".join(names[1:-1])
            if names[0] == top and layer in uses:
                for _, header in own:
                    other = header.removeprefix("tessera/").split("/")
                    inner = "/".join(other[1:-1])
                    if other[0] == top and inner not in ("", layer):
                        uses[layer].add(inner)
        width = max(map(len, layers)) + len(top) + 2
        for layer in ["", *reversed(layers)]:
            used, left = ([name for name in reversed(layers) if (name in uses[layer]) is wanted] for wanted in (True, False))
            names = "all but " + " and ".join(left) if not layer and len(used) > 2 * len(left) > 0 else " ".join(used)
            lines.append(f" {f'{top}/{layer}':{width}}  {'-> ' + names if names else ''}".rstrip())
    return "\n".join(lines)


def in_page(page, drawn):
    """The page with the picture in its place."""
    begin, rest = page.split(PICTURE + "\n", 1)
    return begin + PICTURE + "\n" + drawn + "\n```" + rest.split("\n```", 1)[1]


def selftest(tmp):
    """The check itself must be able to fail."""
    def write(path, *headers):
        (tmp / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp / path).write_text("".join(f'#include "{header}"\n' for header in headers))

    write("tessera/base/bad.h", "tessera/comm/communicator.h")
    write("tessera/shard/bad.cpp", "tessera/comm/shm/shared_memory_link.h", "tessera/tessera.h")
    write("tessera/shard/top.h", "tessera/shard/unit/unit.h")
    write("tessera/shard/unit/unit.h", "tessera/shard/memory/shared.h")
    write("tessera/shard/memory/shared.h", "tessera/comm/control/envelope.h")
    write("tessera/shard/memory/above.cpp", "tessera/shard/unit/unit.h")
    write("tessera/shard/unit/a.h", "tessera/shard/unit/b.h")
    write("tessera/shard/unit/b.cpp", "tessera/shard/unit/a.h")
    write("tessera/shard/good.cpp", "tessera/shard/unit/unit.h")
    write("tessera/shard/norms.h")
    write("tessera/shard/unit/up.cpp", "tessera/shard/norms.h")
    write("tessera/shard/access/open.h", "tessera/shard/unit/unit.h")
    write("tessera/shard/access/hidden.h")
    write("tessera/shard/access/hidden.cpp", "tessera/shard/access/hidden.h", "tessera/shard/unit/unit.h")
    write("tessera/optim/good.cpp", "tessera/shard/access/hidden.h")
    write("tessera/optim/through.cpp", "tessera/shard/top.h")
    write("tessera/comm/mesh.cpp", "tessera/comm/host/link.h")
    write("tessera/shard/call.h", "tessera/shard/norms.h")
    write("tessera/models/good.h", "tessera/shard/call.h")
    write("tessera/models/more.h", "tessera/shard/norms.h")
    (tmp / "cmake").mkdir()
    (tmp / "cmake/packages.cmake").write_text("set(TESSERA_MODELS\n  nn/lora*\n  checkpoint/peft*)\nset(TESSERA_CLI cli/*)\nset(TESSERA_CLI_MODELS cli/models/*)\n")
    write("tessera/cli/models/good.cpp", "tessera/nn/lora.h")
    write("tessera/cli/bad.cpp", "tessera/nn/lora.h")
    write("tessera/nn/lora.h")
    write("tessera/nn/bad.cpp", "tests/testing/net.h")
    write("tessera/checkpoint/bad.cpp", "tessera/nn/lora.h")
    write("tessera/checkpoint/peft.cpp", "tessera/nn/lora.h")  # good, because it is of the same package
    (tmp / "tessera/nn/lora.h").write_text("// Adapters,\n// low.\n#include <torch/torch.h>\n")
    silent = []
    assert "| `lora` | Adapters, low. |" in files_page(tmp, silent) and any("tessera/nn/bad does not say" in each for each in silent), silent
    found = list(complaints(tmp))
    for words in ("nn/lora.h:3: a header may not include torch/torch.h", "base/bad.h: base may not know comm", "bad.cpp: tessera/comm/shm", "bad.cpp:2: includes start with", "top.h: tessera/shard/unit",
                  "up.cpp:1: an inner room of shard may not use tessera/shard/norms.h", "access/open.h: tessera/shard/unit", "memory/above.cpp: tessera/shard/unit/unit.h is in an inner room", "unit/a: includes tessera/shard/unit/b", "mesh.cpp: tessera/comm/host/link.h",
                  "checkpoint/bad.cpp:1: the package core may not include tessera/nn/lora.h, which is of the package models",
                  "cli/bad.cpp:1: the package cli may not include tessera/nn/lora.h", "nn/bad.cpp:1: includes start with tessera/", "models/more.h:1: models may not include tessera/shard/norms.h, but only tessera/shard/call.h, tessera/shard/some_ranks.h",
                  "optim/through.cpp: tessera/shard/unit/unit.h is in an inner room: tessera/shard/top.h -> tessera/shard/unit/unit.h"):
        assert any(words in complaint for complaint in found), (words, found)
    assert not any("good." in complaint or "hidden" in complaint or "peft" in complaint for complaint in found), found


FILES = """# Files

The files of each folder, a header and its source as one line, with the comment that they begin with. This page is made from the test: `python3
tests/check_rooms.py . --draw`. [Architecture](../architecture.md) says which folder may use which."""


def head(path):
    """The comment that a file begins with."""
    text = path.read_text() if path.exists() else ""
    return " ".join(line[2:].strip() for line in re.match(r"(//.*\n)*", text)[0].splitlines())


def files_page(root, wrong):
    lines = [FILES]
    folder = None
    sources = {path.with_suffix("") for path in (root / "tessera").rglob("*.*") if path.suffix in {".h", ".cpp"} and not path.stem.endswith("_test")}
    for stem in sorted((stem for stem in sources if "opaque" not in stem.parts), key=lambda stem: (stem.parent, stem.name)):
        says = head(stem.with_suffix(".h")) or head(stem.with_suffix(".cpp"))
        if not says:
            wrong.append(f"{stem.relative_to(root)} does not say in a comment on its first line what it does")
        if stem.parent != folder:
            folder = stem.parent
            lines.append(f"\n## {folder.relative_to(root)}\n\n| file | has |\n| --- | --- |")
        lines.append(f"| `{stem.name}` | {says.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        selftest(pathlib.Path(folder))
    root = pathlib.Path(sys.argv[1])
    wrong = list(complaints(root))
    architecture, files = root / "docs/architecture.md", root / "docs/tables/files.md"
    pages = {architecture: in_page(architecture.read_text(), picture(includes_of(root))), files: files_page(root, wrong)}
    for page, drawn in pages.items():
        if "--draw" in sys.argv:
            page.write_text(drawn)
        elif not page.exists() or drawn != page.read_text():
            wrong.append(f"{page.relative_to(root)} is not as the code is; draw it anew by python3 tests/check_rooms.py . --draw")
    print("\n".join(wrong) or "every include looks the allowed way")
    sys.exit(1 if wrong else 0)
