"""scripts/abi.sh says what a program misses in a newer installation, here of libraries with two functions and two classes.

abi.py ROOT COMPILER
"""
import pathlib
import subprocess
import sys
import tempfile

ROOT, COMPILER = pathlib.Path(sys.argv[1]), sys.argv[2]
HEADER = "namespace tessera {{\nstruct Options {{ int steps = 1; {member} double rate = 0; }};\nint train(const Options& options{argument});\n}}\n"
SOURCE = '#include <tessera/tessera.h>\nnamespace tessera {{ int train(const Options&{argument}) {{ return 1; }} int {inner}() {{ return 2; }} }}\n'


def installation(folder, member="", argument="", inner="inner", library="libtessera.so"):
    for place in ("include/tessera", "lib"):
        (folder / place).mkdir(parents=True)
    (folder / "include/tessera/tessera.h").write_text(HEADER.format(member=member, argument=argument))
    subprocess.run([COMPILER, "-std=c++20", "-shared", "-fPIC", "-I", folder / "include", "-x", "c++", "-", "-o", folder / "lib" / library], check=True,
                   text=True, input=SOURCE.format(argument=argument, inner=inner))
    return folder


with tempfile.TemporaryDirectory() as place:
    place = pathlib.Path(place)
    old = installation(place / "old")
    for name, words, changes in (("same", "programs built with", {"inner": "other"}),
                                 ("grown", "1 data member insertion:\n      'int more'", {"member": "int more = 2;"}),
                                 ("argument", "train(tessera::Options const&)", {"argument": ", int steps"}),
                                 ("moved", "missing libraries:\nlibtessera.so", {"library": "libtessera_core.so"})):
        done = subprocess.run([ROOT / "scripts/abi.sh", old, installation(place / name, **changes)], stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, check=False)
        assert (done.returncode == 0) == (name == "same") and words in done.stdout, (name, done)
print("layouts, functions and libraries are compared")
