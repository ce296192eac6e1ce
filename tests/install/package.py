"""What is installed needs no more than it says: its headers libtorch and the standard library, its libraries what docs/install.md names. The
core alone trains, saves and resumes; each package adds itself; a program may take another folder with a libtorch of the same minor version.

package.py BUILD
"""
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from check_rooms import files_of_packages, matches

BUILD = pathlib.Path(sys.argv[1]).resolve()


def run(*command):
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


def headers_behind(compiler, text, *flags):
    """All headers that a source reads."""
    rule = subprocess.run([compiler, "-std=c++20", "-M", "-x", "c++", *map(str, flags), "-"], input=text, stdout=subprocess.PIPE, text=True, check=True).stdout
    return {str(pathlib.Path(name).resolve()) for name in rule.replace("\\\n", " ").split()[1:]}


def check_headers(include, torch, compiler):
    """Whatever the headers read lies beside them, or is read by libtorch's headers or a part of the standard library. Returns their names."""
    flags = [part for folder in ("include", "include/torch/csrc/api/include") for part in ("-isystem", torch / folder)]
    headers = sorted(path.relative_to(include).as_posix() for path in include.rglob("*.h"))
    text = "".join(f"#include <{header}>\n" for header in headers if header != "tessera/mpi.h")  # which is for programs that have MPI's header
    ours = headers_behind(compiler, text, "-I", include, *flags)
    allowed = headers_behind(compiler, "#include <bits/stdc++.h>\n#include <torch/torch.h>\n#include <unistd.h>\n", *flags)
    others = sorted(path for path in ours - allowed if not path.startswith((str(include.resolve()), str(torch.resolve()))))
    assert not others, f"installed headers read {others}"
    return set(headers)


def check_libraries(library, page):
    """The page on installing names every library that is loaded beside those of the compiler and of libtorch."""
    needed = re.findall(r"\(NEEDED\).*\[(lib[^\].]*)", run("readelf", "-d", library))
    usual = {"libc", "libm", "libstdc++", "libgcc_s", "libtorch", "libtorch_cpu", "libc10"}
    usual |= {"libtessera", "libtessera_models", "libtessera_vision", "libtessera_xla"}
    unnamed = [name for name in needed if name not in usual and f"`{name}`" not in page.read_text()]
    assert needed and not unnamed, f"{page} does not name {unnamed}"


def cached(folder, name):
    return pathlib.Path(re.search(rf"^{name}:\w+=(.*)$", (folder / "CMakeCache.txt").read_text(), re.M).group(1))


CMAKE = """cmake_minimum_required(VERSION 3.25)
project(Other LANGUAGES CXX)
find_package(Tessera ${VERSION} REQUIRED COMPONENTS ${WANTED})
foreach(_program IN LISTS PROGRAMS)
  add_executable(${_program} ${_program}.cpp)
  target_link_libraries(${_program} PRIVATE ${LINKED})
endforeach()
"""
CORE = """#include <tessera/tessera.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>
using namespace tessera;
int main(int, char** argv) {
  const auto world = init();
  torch::manual_seed(1);
  torch::nn::Linear model(4, 2);
  fully_shard(model, {.mesh = world});
  optim::AdamW optimizer(model->parameters(), {.lr = 1e-2});
  checkpoint::Contents contents{.model = model.get(), .optimizer = &optimizer};
  int64_t step = 0;
  if (const auto last = checkpoint::latest(argv[1], world)) {
    checkpoint::load(*last, contents, world);
    step = contents.notes.at("step").as<int64_t>();
  }
  for (const auto end = step + 2; step < end; step++) {
    model(torch::ones({1, 4})).sum().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  contents.notes["step"] = step;
  checkpoint::save(checkpoint::step_folder(argv[1], step), contents, world);
  if (world.rank() == 0) std::printf("step %d of %d ranks\\n", static_cast<int>(step), world.size());
}
"""
MODELS = """#include <tessera/models/mlp.h>
#include <tessera/nn/lora.h>
int main() {
  tessera::models::Mlp model(tessera::models::MlpOptions{.width = 8, .layers = 2, .classes = 4});
  tessera::lora::apply(model, {.r = 2});
  std::printf("%d adapters\\n", static_cast<int>(tessera::lora::adapters(model).size()));
}
"""
VISION = """#include <tessera/vision.h>
#include <exception>
int main() {
  try {
    tessera::vision::decode_image("GIF89a", "drawing.gif");
  } catch (const std::exception& error) {
    std::printf("%s\\n", error.what());
  }
}
"""
XLA = """#include <tessera/xla/init.h>
int main() { std::printf("replicas: %d\\n", tessera::xla::init().size()); }
"""


def relabelled(torch, folder, version):
    """A folder with a libtorch whose header says another version."""
    header = pathlib.Path("include/torch/headeronly/version.h")
    for place in (pathlib.Path("."), *list(header.parents)[-2::-1]):
        (folder / place).mkdir()
        for entry in (torch / place).iterdir():
            if entry.relative_to(torch) not in (header, *header.parents):
                (folder / place / entry.name).symlink_to(entry)
    (folder / header).write_text("".join(f"#define TORCH_VERSION_{name} {number}\n" for name, number in zip(("MAJOR", "MINOR", "PATCH"), version)))
    return folder


def two_ranks(*command):
    """What rank 0 says, without a launcher: that is of another package."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              env=os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
             for rank in range(2)]
    try:
        said = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), said
    return said[0]


def check_pkg_config(folder, prefix, compiler, torch):
    """A program that is compiled with the flags of pkg-config finds the library and libtorch when it runs."""
    if not shutil.which("pkg-config"):
        return
    os.environ["PKG_CONFIG_PATH"] = str(next(prefix.glob("lib*/pkgconfig")))
    (folder / "light.cpp").write_text("#include <tessera/base/error.h>\n#include <cstdio>\n"
                                      'int main() { std::puts(tessera::UsageError("pkg-config has {}", "all").what()); }\n')
    flags = run("pkg-config", "--cflags", "--libs", "tessera").split()
    run(compiler, folder / "light.cpp", "-o", folder / "light", "-Wl,--no-as-needed", *flags)
    assert "pkg-config has all" in run(folder / "light")
    assert run("pkg-config", "--variable=torch", "tessera").strip() == str(torch)
    assert "-isystem /other/include" in run("pkg-config", "--define-variable=torch=/other", "--cflags", "tessera")


with tempfile.TemporaryDirectory() as folder:
    folder = pathlib.Path(folder)
    prefix, include = folder / "installed", folder / "installed/include"
    torch = cached(BUILD, "Libtorch_CPU_LIBRARY").parent.parent
    compiler, source = cached(BUILD, "CMAKE_CXX_COMPILER"), cached(BUILD, "CMAKE_HOME_DIRECTORY")
    has_xla = cached(BUILD, "PJRT_INCLUDE_DIR").is_dir()
    has_vision = str(cached(BUILD, "TESSERA_HAS_VISION")) == "ON"
    for name, text in (("CMakeLists.txt", CMAKE), ("core.cpp", CORE), ("models.cpp", MODELS), ("vision.cpp", VISION), ("xla.cpp", XLA)):
        (folder / name).write_text(text)

    def configure(build, *settings, wanted="core", linked="tessera::core", programs="", version=str(cached(BUILD, "CMAKE_PROJECT_VERSION")).rpartition(".")[0]):
        return subprocess.run(["cmake", "-S", folder, "-B", folder / build, "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={prefix}", "-DCMAKE_CXX_STANDARD=20",
                               f"-DVERSION={version}", f"-DWANTED={wanted}", f"-DLINKED={linked}", f"-DPROGRAMS={programs}", *settings],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)

    def build(name, program, wanted, linked):
        done = configure(name, wanted=wanted, linked=linked, programs=program)
        assert done.returncode == 0, done.stdout
        run("cmake", "--build", folder / name)
        return folder / name / program

    def install(*packages):
        return "".join(run("cmake", "--install", BUILD, "--prefix", prefix, "--component", package) for package in packages)

    said = install("core")
    assert (f"loads libtorch from {torch}, so that folder must stay" in said) == torch.is_relative_to(source), said
    headers = check_headers(include, torch, compiler)
    assert {"tessera/tessera.h", "tessera/extending.h"} <= headers, headers
    check_pkg_config(folder, prefix, compiler, torch)
    modules = sorted(path.name for path in (BUILD / "lib/tessera").glob("*.so"))  # one for each MPI
    if modules:
        install("mpi")
    assert sorted(path.name for path in prefix.glob("lib*/tessera/*.so")) == modules, modules
    patterns = sum(files_of_packages(source).values(), [])
    others = [name for name in headers if matches(name.removeprefix("tessera/"), patterns)]
    assert not others, f"the core has headers of other packages: {others}"
    libraries = [path.name for path in prefix.glob("lib*/lib*.so*")]
    assert all(name.startswith("libtessera.so") for name in libraries), libraries
    core = next(prefix.glob("lib*/libtessera.so"))
    functions = run("nm", "-DC", "--defined-only", core)
    of_others = "lora::|llm::|models::|vision::|xla::|cli::|data::Tokenizer|data::WordPiece|nn::quantize|nn::RmsNorm"
    others = sorted(set(re.findall(rf" T (tessera::(?:{of_others})[^(\n]*)", functions)))
    assert not others and "tessera::fully_shard(" in functions, f"the core has functions of other packages: {others}"
    program = build("core", "core", "core", "tessera::core")
    assert "step 2 of 2 ranks" in two_ranks(program, folder / "run")
    assert "step 4 of 2 ranks" in two_ranks(program, folder / "run"), "the second run does not resume"
    for wanted, words in (("core;models", "its package models was not installed"), ("core;vision", "its package vision was not installed"),
                          ("core;sound", "there is no package sound")):
        done = configure("none", wanted=wanted)
        assert done.returncode != 0 and words in re.sub(r"\s+", " ", done.stdout), done.stdout
    done = configure("none", version="99.0")
    assert done.returncode != 0 and 'compatible with requested version "99.0"' in re.sub(r"\s+", " ", done.stdout), done.stdout

    install("models")
    assert {"tessera/models.h", "tessera/nn/lora.h"} <= check_headers(include, torch, compiler)
    assert "adapters" in run(build("models", "models", "core;models", "tessera::models"))
    if has_vision:
        install("vision")
        assert "tessera/vision/image.h" in check_headers(include, torch, compiler)
        assert "drawing.gif is not a JPEG, PNG or WebP" in run(build("vision", "vision", "core;vision", "tessera::vision"))
    if has_xla:
        install("xla")
        assert "tessera/xla/init.h" in check_headers(include, torch, compiler)
        assert "replicas: 1" in run(build("xla", "xla", "xla", "tessera::tessera"))
    install("cli")
    program, module = prefix / "bin/tessera", next(prefix.glob("lib*/libtessera_cli_models.so"))
    assert "tokenize" in run(program, "data", "--help")
    assert pathlib.Path(run(program, "--cmake-prefix").strip()).samefile(prefix)
    module.rename(module.with_suffix(".away"))
    done = subprocess.run([program, "data", "tokenize", "x"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 1 and "tessera data needs Tessera's package models" in done.stdout, done
    for library in prefix.glob("lib*/libtessera*.so"):
        check_libraries(library, source / "docs/install.md")

    (folder / "other").mkdir()
    for entry in torch.iterdir():
        (folder / "other" / entry.name).symlink_to(entry)
    (folder / "empty.cpp").write_text("int main() {}\n")
    for setting in ("TESSERA_TORCH=" + str(folder / "other"), "Torch_DIR=" + str(folder / "other/share/cmake/Torch")):
        name = setting.split("=")[0]
        core_only = name == "Torch_DIR"
        done = configure(name, f"-D{setting}", programs="empty", linked="tessera::core" if core_only else "tessera::tessera")
        assert done.returncode == 0, done.stdout
        rules = (folder / name / "build.ninja").read_text()
        assert f"{folder}/other/lib/libtorch_cpu.so" in rules and f"{torch}/" not in rules, name
        assert ("libtessera_models" in rules) != core_only, name
    major, minor, patch = (int(re.search(rf"TORCH_VERSION_{name} (\d+)", (torch / "include/torch/headeronly/version.h").read_text())[1])
                           for name in ("MAJOR", "MINOR", "PATCH"))
    for version in ((major, minor, patch + 1), (major, 12 if minor == 11 else 11, 0)):
        place = relabelled(torch, folder / "version{}.{}.{}".format(*version), version)
        done = configure(place.name + "-build", f"-DTESSERA_TORCH={place}", programs="empty")
        assert (done.returncode == 0) == (version[1] == minor), done.stdout
        refusal = f"so take a libtorch {major}.{minor}, or build Tessera again"
        assert (refusal in re.sub(r"\s+", " ", done.stdout)) == (version[1] != minor), done.stdout
print("the packages need what they say, and a program takes the libtorch that it is given")
