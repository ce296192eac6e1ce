"""What cpack makes of a build: the files, man pages and completions in it, what the .deb depends on, and that the .tar.gz works beside a libtorch.

packed.py BUILD
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

BUILD = pathlib.Path(sys.argv[1]).resolve()
CACHE = (BUILD / "CMakeCache.txt").read_text()


def cached(name):
    return re.search(rf"^{name}:\w+=(.*)$", CACHE, re.M).group(1)


def run(*command, **options):
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout
    return done.stdout


def check_files(root, torch):
    """The files of an unpacked package, without those for MPI."""
    names = {path.relative_to(root).as_posix() for path in root.rglob("*") if not path.is_dir()}
    expected = {"bin/tessera", "include/tessera/tessera.h", "lib/cmake/Tessera/TesseraConfig.cmake", "lib/pkgconfig/tessera.pc", "share/doc/tessera/copyright",
                "share/bash-completion/completions/tessera", "share/fish/vendor_completions.d/tessera.fish", "share/man/man1/tessera.1",
                "share/man/man1/tessera-launch.1", "share/man/man1/tessera-ckpt-merge.1"}
    assert expected <= names, expected - names
    assert sum(name.endswith("/_tessera") for name in names) == 1, "zsh"
    for package in ("models", "vision", "xla"):
        files = {f"lib/libtessera_{package}.so", f"lib/pkgconfig/tessera-{package}.pc", f"lib/cmake/Tessera/Tessera_{package}.cmake"}
        assert not (BUILD / f"lib/libtessera_{package}.so").exists() or files <= names, files - names
    for name in names:
        path = root / name
        if re.match(r"bin/tessera$|lib/libtessera[^/]*\.so", name) and not path.is_symlink():
            assert "[$ORIGIN:$ORIGIN/../lib:$ORIGIN/../../torch/lib:/opt/torch/lib]" in run("readelf", "-d", path), name
        elif name.startswith(("lib/cmake", "lib/pkgconfig", "share")):
            text = path.read_text()
            assert str(torch) not in text and str(BUILD) not in text, f"{name} names folders of this build"


with tempfile.TemporaryDirectory() as folder:
    folder = pathlib.Path(folder)
    torch = pathlib.Path(cached("Libtorch_CPU_LIBRARY")).parent.parent
    version = cached("CMAKE_PROJECT_VERSION")
    has_dpkg = shutil.which("dpkg-shlibdeps") is not None
    cpack = pathlib.Path(cached("CMAKE_COMMAND")).parent / "cpack"
    run(cpack, "--config", BUILD / "CPackConfig.cmake", "-B", folder)

    archive = folder / f"tessera-{version}-Linux-{os.uname().machine}.tar.gz"
    run("tar", "xzf", archive, "-C", folder)
    prefix = folder / archive.name.removesuffix(".tar.gz")
    check_files(prefix, torch)
    (folder / "torch").symlink_to(torch)
    assert version in run(prefix / "bin/tessera", "version")
    (folder / "CMakeLists.txt").write_text("cmake_minimum_required(VERSION 3.25)\nproject(Other LANGUAGES CXX)\nfind_package(Tessera REQUIRED)\n"
                                           "add_executable(other other.cpp)\ntarget_link_libraries(other PRIVATE tessera::core)\n")
    (folder / "other.cpp").write_text("int main() {}\n")
    without = {name: value for name, value in os.environ.items() if name not in ("TESSERA_TORCH", "Torch_DIR")}
    said = run("cmake", "-S", folder, "-B", folder / "build", "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={prefix}", env=without)
    assert f"{torch}/lib/libtorch_cpu.so" in (folder / "build/build.ninja").read_text(), said

    if has_dpkg:
        deb = next(folder.glob(f"tessera_{version}_*.deb"))
        run("dpkg-deb", "-x", deb, folder / "deb")
        check_files(folder / "deb/usr", torch)
        assert (folder / "deb/usr/share/zsh/vendor-completions/_tessera").exists()
        about = run("dpkg-deb", "-I", deb)
        assert "libyaml-cpp" in about and "libdeflate" in about and "mpi" not in re.search(r"Depends: .*", about)[0], about
        assert re.search(r"loads libtorch \d+\.\d+\.\d+", about) and "/opt/torch" in about, about
        assert "ln -s FOLDER/site-packages/torch /opt/torch" in run("dpkg-deb", "-I", deb, "postinst")
        modules = [path.name for path in (BUILD / "lib/tessera").glob("*.so")]
        if modules:
            said = run("dpkg-deb", "-c", next(folder.glob(f"tessera-mpi_{version}_*.deb")))
            assert all(name in said for name in modules) and "libtessera.so" not in said, said
print("the packages have what an installation has, and load the libtorch beside them")
