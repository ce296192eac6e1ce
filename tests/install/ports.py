"""The vcpkg port and the Conan recipe. vcpkg itself is not run: its functions stand in for it, with the options that the port gives them.

ports.py BUILD [--long]   with --long, Conan builds the package
"""
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

BUILD = pathlib.Path(sys.argv[1]).resolve()
CACHE = (BUILD / "CMakeCache.txt").read_text()
FUNCTIONS = """cmake_minimum_required(VERSION 3.25)
function(vcpkg_cmake_configure)
  cmake_parse_arguments(PARSE_ARGV 0 _arg "" SOURCE_PATH OPTIONS)
  execute_process(COMMAND ${CMAKE_COMMAND} -S "${_arg_SOURCE_PATH}" -B "${BUILDTREE}" -G Ninja ${_arg_OPTIONS} ${KNOWN} COMMAND_ERROR_IS_FATAL ANY)
endfunction()
function(vcpkg_install_copyright)
  cmake_parse_arguments(PARSE_ARGV 0 _arg "" "" FILE_LIST)
  file(SIZE "${_arg_FILE_LIST}" _size)
endfunction()
foreach(_other IN ITEMS vcpkg_check_linkage vcpkg_cmake_install vcpkg_cmake_config_fixup vcpkg_fixup_pkgconfig vcpkg_copy_tools)
  cmake_language(EVAL CODE "function(${_other})\\nendfunction()")
endforeach()
include("${PORT}")
"""


def cached(name):
    return re.search(rf"^{name}:\w+=(.*)$", CACHE, re.M).group(1)


SOURCE = pathlib.Path(cached("CMAKE_HOME_DIRECTORY"))
TORCH = pathlib.Path(cached("Libtorch_CPU_LIBRARY")).parent.parent
VERSION = cached("CMAKE_PROJECT_VERSION")


def run(*command, **options):
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **options)
    return done.returncode, done.stdout


def check_container():
    """The Containerfile installs what the page on installing names."""
    def packages(path):
        return set(re.findall(r"\S+-dev\b", re.search(r"apt-get install (?:.*\\\n)+.*", path.read_text())[0]))

    named = packages(SOURCE / "docs/install.md")
    assert "libfmt-dev" in named and packages(SOURCE / "packaging/Containerfile") - {"dpkg-dev"} == named, named


def check_vcpkg(folder):
    port = SOURCE / "packaging/vcpkg"
    manifest = json.loads((port / "vcpkg.json").read_text())
    assert manifest["version"] == VERSION, f"vcpkg.json has the version {manifest['version']}, not {VERSION}"
    (folder / "run.cmake").write_text(FUNCTIONS)
    known = ";".join(f"-D{name}={cached(name)}" for name in ("TESSERA_LIBTORCH_WORKS", "Libtorch_LAST", "CMAKE_CXX_COMPILER"))

    def port_with(torch, *features):
        return run("cmake", f"-DFEATURES={';'.join(features)}", f"-DBUILDTREE={folder / 'vcpkg'}",
                   f"-DCURRENT_PACKAGES_DIR={folder / 'packages'}", f"-DKNOWN={known}", f"-DPORT={port / 'portfile.cmake'}", "-P", folder / "run.cmake", env=os.environ | {"TESSERA_TORCH": str(torch)})

    status, said = port_with("nowhere", "cli")
    assert status != 0 and "Set TESSERA_TORCH in the environment" in said, said
    features = [name for name in manifest["features"] if name != "vision" or cached("TESSERA_HAS_VISION") == "ON"]
    status, said = port_with(TORCH, *features)
    assert status == 0, said
    cache = (folder / "vcpkg/CMakeCache.txt").read_text()
    assert f"TESSERA_PACKAGES:STRING={';'.join(['core', *(name for name in ('models', 'vision', 'cli') if name in features)])}\n" in cache, cache
    assert "TESSERA_TESTS:BOOL=OFF" in cache


def check_conan(folder):
    environment = os.environ | {"CONAN_HOME": str(folder / "conan"), "PYTHONPATH": str(folder / "python")}
    status, said = run(sys.executable, "-m", "pip", "install", "--quiet", "--target", folder / "python", "conan==2.34.0")
    assert status == 0, said

    def conan(*words):
        return run(sys.executable, "-m", "conans.conan", *words, env=environment)

    status, said = conan("profile", "detect")
    assert status == 0, said
    recipe = SOURCE / "packaging/conan"
    status, said = conan("create", recipe, "-c", "user.tessera:torch=/nowhere")
    assert status != 0 and "no libtorch in '/nowhere'" in said, said
    status, said = conan("create", recipe, "-c", f"user.tessera:torch={TORCH}")
    assert status == 0 and f"tessera/{VERSION}" in said, said
    program = next((folder / "conan").rglob("p/bin/tessera"))
    status, said = run(program, "launch", "-n", "2", program, "test")
    assert status == 0 and re.search(r"shm: 2 ranks.*errors +ok", said, re.S), said

    (folder / "project").mkdir()
    (folder / "project/conanfile.txt").write_text(f"[requires]\ntessera/{VERSION}\n[generators]\nCMakeToolchain\nCMakeDeps\n")
    (folder / "project/CMakeLists.txt").write_text("cmake_minimum_required(VERSION 3.25)\nproject(Other LANGUAGES CXX)\n"
                                                   "find_package(Tessera REQUIRED COMPONENTS core)\n")
    status, said = conan("install", folder / "project", "--output-folder", folder / "out", "-c", f"user.tessera:torch={TORCH}")
    assert status == 0, said
    status, said = run("cmake", "-S", folder / "project", "-B", folder / "out/build", f"-DCMAKE_TOOLCHAIN_FILE={folder / 'out/conan_toolchain.cmake'}",
                       "-DCMAKE_BUILD_TYPE=Release")
    assert status == 0, said


with tempfile.TemporaryDirectory() as name:
    check_container()
    check_vcpkg(pathlib.Path(name))
    if "--long" in sys.argv:
        check_conan(pathlib.Path(name))
print("the port configures" + (", and the recipe builds" if "--long" in sys.argv else ""))
