"""What is installed needs no more than it says: its headers libtorch and the standard library, its library what the page on installing names. It
says which libtorch it leans on, and a program may take another folder with the same libtorch.

package.py BUILD
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


def headers_behind(compiler, text, *flags):
    """All headers that a source reads."""
    rule = subprocess.run([compiler, "-std=c++20", "-M", "-x", "c++", *map(str, flags), "-"], input=text, stdout=subprocess.PIPE, text=True, check=True).stdout
    return {str(pathlib.Path(name).resolve()) for name in rule.replace("\\\n", " ").split()[1:]}


def check_headers(include, torch, compiler, has_xla):
    """Whatever the headers read lies beside them, or is read by libtorch's headers or a part of the standard library."""
    flags = [part for folder in ("include", "include/torch/csrc/api/include") for part in ("-isystem", torch / folder)]
    headers = sorted(path.relative_to(include).as_posix() for path in include.rglob("*.h"))
    assert {"tessera/tessera.h", "tessera/extending.h", "tessera/models/mnist.h"} <= set(headers), headers
    assert ("tessera/xla/init.h" in headers) == has_xla, headers
    ours = headers_behind(compiler, "".join(f"#include <{header}>\n" for header in headers), "-I", include, *flags)
    allowed = headers_behind(compiler, "#include <bits/stdc++.h>\n#include <torch/torch.h>\n#include <unistd.h>\n", *flags)
    others = sorted(path for path in ours - allowed if not path.startswith((str(include.resolve()), str(torch.resolve()))))
    assert not others, f"installed headers read {others}"


def check_libraries(library, page):
    """The page on installing names every library that is loaded beside those of the compiler and of libtorch."""
    needed = re.findall(r"\(NEEDED\).*\[(lib[^\].]*)", run("readelf", "-d", library))
    usual = {"libc", "libm", "libstdc++", "libgcc_s", "libtorch", "libtorch_cpu", "libc10", "libtessera"}
    unnamed = [name for name in needed if name not in usual and f"`{name}`" not in page.read_text()]
    assert needed and not unnamed, f"{page} does not name {unnamed}"


def cached(folder, name):
    return pathlib.Path(re.search(rf"^{name}:\w+=(.*)$", (folder / "CMakeCache.txt").read_text(), re.M).group(1))


with tempfile.TemporaryDirectory() as folder:
    folder = pathlib.Path(folder)
    torch = cached(BUILD, "Libtorch_CPU_LIBRARY").parent.parent
    said = run("cmake", "--install", BUILD, "--prefix", folder / "installed")
    check_headers(folder / "installed/include", torch, cached(BUILD, "CMAKE_CXX_COMPILER"), cached(BUILD, "PJRT_INCLUDE_DIR").is_dir())
    source = cached(BUILD, "CMAKE_HOME_DIRECTORY")
    libraries = {library.stem: library for library in (folder / "installed").glob("lib*/libtessera*.so")}
    for library in libraries.values():
        check_libraries(library, source / "docs/getting-started.md")
    core = run("nm", "-DC", "--defined-only", libraries["libtessera"])
    others = sorted(set(re.findall(r" T (tessera::(?:lora|llm|models|xla|cli)::[^(\n]*)", core)))
    assert not others and "tessera::fully_shard(" in core, f"the core has functions of other packages: {others}"
    in_clone = torch.is_relative_to(source)
    assert (f"loads libtorch from {torch}, so that folder must stay" in said) == in_clone, said

    (folder / "other").mkdir()
    for entry in torch.iterdir():
        (folder / "other" / entry.name).symlink_to(entry)
    (folder / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(Other LANGUAGES CXX)\nfind_package(Tessera REQUIRED COMPONENTS ${WANTED})\n"
        "add_executable(other main.cpp)\ntarget_link_libraries(other PRIVATE ${LINKED})\n")
    (folder / "main.cpp").write_text("int main() {}\n")
    for setting in ("TESSERA_TORCH=" + str(folder / "other"), "Torch_DIR=" + str(folder / "other/share/cmake/Torch")):
        name = setting.split("=")[0]
        core_only = name == "Torch_DIR"
        run("cmake", "-S", folder, "-B", folder / name, "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={folder}/installed", f"-D{setting}",
            "-DWANTED=core" + ("" if core_only else ";models"), "-DLINKED=tessera::" + ("core" if core_only else "tessera"))
        rules = (folder / name / "build.ninja").read_text()
        assert f"{folder}/other/lib/libtorch_cpu.so" in rules and f"{torch}/" not in rules, name
        assert ("libtessera_models" in rules) != core_only, name
    said = subprocess.run(["cmake", "-S", folder, "-B", folder / "none", f"-DCMAKE_PREFIX_PATH={folder}/installed", "-DWANTED=core;vision", "-DLINKED="],
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert said.returncode != 0 and "it was installed without the package vision" in re.sub(r"\s+", " ", said.stdout), said.stdout
print("the package needs what it says, and a program takes the libtorch that it is given")
