"""A project that adds Tessera gets the core alone, and nothing of its own is changed; packages can be chosen, and wrong choices are named.

projects.py BUILD [--long]   with --long it also builds the core, and runs a program with it
"""
import pathlib
import re
import subprocess
import sys
import tempfile

BUILD = pathlib.Path(sys.argv[1]).resolve()
CACHE = (BUILD / "CMakeCache.txt").read_text()
# What the parent sets is for its own sources, and would break ours.
PARENT = """cmake_minimum_required(VERSION 3.25)
project(Parent VERSION 7.8.9 LANGUAGES CXX)
include(CTest)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
add_compile_options(-Werror)
function(settings result)
  get_cmake_property(_names VARIABLES)
  list(FILTER _names INCLUDE REGEX "^(CMAKE|CPACK|BUILD)_")
  list(FILTER _names EXCLUDE REGEX "^CMAKE_(INSTALL_.*DIR|.*CURRENT_FUNCTION.*|HAVE_LIBC_PTHREAD)$")
  set(_all "")
  foreach(_name IN LISTS _names)
    string(APPEND _all "${_name}=${${_name}}\\n")
  endforeach()
  foreach(_property IN ITEMS COMPILE_OPTIONS COMPILE_DEFINITIONS LINK_OPTIONS INCLUDE_DIRECTORIES TESTS)
    get_directory_property(_value ${_property})
    string(APPEND _all "${_property}=${_value}\\n")
  endforeach()
  set(${result} "${_all}" PARENT_SCOPE)
endfunction()
include(FetchContent)
get_cmake_property(_commands_before COMMANDS)
settings(_before)
if(WAY STREQUAL "add_subdirectory")
  add_subdirectory("${TESSERA_SOURCE}" tessera)
else()
  FetchContent_Declare(Tessera SOURCE_DIR "${TESSERA_SOURCE}" SYSTEM)
  FetchContent_MakeAvailable(Tessera)
endif()
settings(_after)
if(NOT _before STREQUAL _after)
  message(FATAL_ERROR "settings have changed from\\n${_before}\\nto\\n${_after}")
endif()
get_property(_targets DIRECTORY "${TESSERA_SOURCE}" PROPERTY BUILDSYSTEM_TARGETS)
get_property(_tests DIRECTORY "${TESSERA_SOURCE}" PROPERTY TESTS)
message(STATUS "targets: ${_targets}; tests: ${_tests}.")
add_executable(program program.cpp)
target_link_libraries(program PRIVATE tessera::core)
install(TARGETS program)
"""


def cached(name):
    return re.search(rf"^{name}:\w+=(.*)$", CACHE, re.M).group(1)


SOURCE, TORCH = pathlib.Path(cached("CMAKE_HOME_DIRECTORY")), pathlib.Path(cached("Libtorch_CPU_LIBRARY")).parent.parent
# What that build has found out about libtorch need not be found out again.
KNOWN = [f"-DTESSERA_TORCH={TORCH}", *(f"-D{name}={cached(name)}" for name in ("TESSERA_LIBTORCH_WORKS", "Libtorch_LAST", "CMAKE_CXX_COMPILER"))]


def run(*command, fails=False):
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert (done.returncode != 0) == fails, done.stdout
    return done.stdout


def configure(source, build, *settings, fails=False):
    return run("cmake", "-S", source, "-B", build, "-G", "Ninja", *KNOWN, *settings, fails=fails)


def commands(build, target):
    return run("ninja", "-C", build, "-t", "commands", target)


def functions_of(path):
    return re.findall(r"^\s*(?:function|macro)\((\w+)", path.read_text(), re.M)


with tempfile.TemporaryDirectory() as folder:
    folder = pathlib.Path(folder)
    (folder / "CMakeLists.txt").write_text(PARENT)
    (folder / "program.cpp").write_text((SOURCE / "examples/first.cpp").read_text() if "--long" in sys.argv else "int main() {}\n")

    # Functions and macros of CMake are known everywhere.
    files = [SOURCE / "CMakeLists.txt", *(path for path in (SOURCE / "cmake").glob("*.cmake") if path.name != "tests.cmake")]
    others = [name for path in files for name in functions_of(path) if not name.startswith("tessera_")]
    assert not others, f"functions whose names could be those of another project: {others}"

    for way in ("add_subdirectory", "FetchContent"):
        said = configure(folder, folder / way, f"-DWAY={way}", f"-DTESSERA_SOURCE={SOURCE}")
        targets, tests = re.search(r"targets: (.*); tests: (.*)\.", said).groups()
        assert not tests and all(name.startswith("tessera") for name in targets.split(";")), said
        assert {"tessera_models", "tessera_cli", "tessera_headers"}.isdisjoint(targets.split(";")), targets
        of_program = next(line for line in commands(folder / way, "program").splitlines() if "program.cpp.o -c" in line)
        assert "-Wall" not in of_program and " -w " not in of_program and "-O1" not in of_program, of_program
        assert "-isystem" in of_program and str(TORCH / "include") in of_program, of_program
        of_core = commands(folder / way, "tessera")
        assert " -w " in of_core and "-fvisibility=hidden" not in of_core and "unity_0" in of_core, of_core[:2000]
        assert not (folder / way / "compile_commands.json").exists()
        rules = "".join(path.read_text() for path in (folder / way).rglob("cmake_install.cmake"))
        assert "/program" in rules and "libtessera" not in rules, "the parent would install Tessera"

    # By itself, with the packages that are chosen.
    configure(SOURCE, folder / "chosen", "-DTESSERA_PACKAGES=core;cli")
    targets = run("ninja", "-C", folder / "chosen", "-t", "targets", "all")
    assert "tessera_cli:" in targets and not re.search(r"^(tessera_models|mnist|examples|test_comm):", targets, re.M), targets
    for settings, words in ((["-DTESSERA_PACKAGES=sound"], "TESSERA_PACKAGES names sound; there are core, models, vision, xla and cli"),
                            (["-DTESSERA_PACKAGES=core", "-DTESSERA_TESTS=ON"], "TESSERA_PACKAGES is without models;vision;xla;cli"),
                            ([f"-DTESSERA_TORCH={folder}"], "no libtorch in")):
        said = configure(SOURCE, pathlib.Path(tempfile.mkdtemp(dir=folder)), *settings, fails=True)
        assert words in re.sub(r"\s+", " ", said), said

    if "--long" in sys.argv:
        run("cmake", "--build", folder / "FetchContent", "--target", "program")
        said = run(BUILD / "bin/tessera", "launch", "-n", "2", folder / "FetchContent/program")
        assert "step 99 loss" in said, said
print("projects that add Tessera get what they choose, and keep their settings")
