"""An installed Tessera says which libtorch it leans on, and a program may take another folder with the same libtorch.

other_libtorch.py BUILD
"""
import pathlib
import re
import subprocess
import sys
import tempfile

BUILD = pathlib.Path(sys.argv[1]).resolve()


def run(*command):
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


def cached(folder, name):
    return pathlib.Path(re.search(rf"^{name}:\w+=(.*)$", (folder / "CMakeCache.txt").read_text(), re.M).group(1))


with tempfile.TemporaryDirectory() as folder:
    folder = pathlib.Path(folder)
    torch = cached(BUILD, "Libtorch_CPU_LIBRARY").parent.parent
    said = run("cmake", "--install", BUILD, "--prefix", folder / "installed")
    in_clone = torch.is_relative_to(cached(BUILD, "CMAKE_HOME_DIRECTORY"))
    assert (f"loads libtorch from {torch}, so that folder must stay" in said) == in_clone, said

    (folder / "other").mkdir()
    for entry in torch.iterdir():
        (folder / "other" / entry.name).symlink_to(entry)
    (folder / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(Other LANGUAGES CXX)\nfind_package(Tessera REQUIRED)\n"
        "add_executable(other main.cpp)\ntarget_link_libraries(other PRIVATE tessera::tessera)\n")
    (folder / "main.cpp").write_text("int main() {}\n")
    for setting in ("TESSERA_TORCH=" + str(folder / "other"), "Torch_DIR=" + str(folder / "other/share/cmake/Torch")):
        name = setting.split("=")[0]
        run("cmake", "-S", folder, "-B", folder / name, "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={folder}/installed", f"-D{setting}")
        rules = (folder / name / "build.ninja").read_text()
        assert f"{folder}/other/lib/libtorch_cpu.so" in rules and f"{torch}/" not in rules, name
print("a program takes the libtorch that it is given")
