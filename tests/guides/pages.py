"""Keeps the guides true: their listings come from the examples, and their command lines are run.

pages.py listings ROOT            every C++ listing of a page is a part of a program in examples/ or of a file in tests/extending/, and those of the README
                                  are whole programs; every diff is a part of a patch there, and in the README leads to lines of a program, in their order;
                                  files that pages name are there; tables of options have the order of the headers; pages and their lines are short;
                                  examples/README.md names each example, which has at most 60 lines, and says in the first how it is run
pages.py commands ROOT BUILD PAGE runs the command lines of one page, in order, in a new folder where build, examples and docs are those of the clone

A listing may leave out lines where it says `// ...`; indentation and remarks at the ends of lines do not count. Command lines stand in blocks of
the language `console` behind `$ `, and the lines that the page shows below them must be printed on a terminal; numbers may differ, `...` stands for
anything, and of progress bars only the words count. `# status 2` at the end of a command says with which status it ends. A block after a line that ends with
"`NAME`:" is a file to write.
"""
import os
import pathlib
import pty
import re
import shutil
import subprocess
import sys
import tempfile
import termios

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
LONGEST_EXAMPLE, LONGEST_PAGE, LONGEST_LINE, LONGEST_LISTING = 60, 250, 160, 90
NUMBER = re.compile(r"\d+(\.\d+)?(e[-+]?\d+)?")


def pages_of(root):
    return [root / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md", "bench/results.md")] + sorted((root / "docs").rglob("*.md"))


# --- listings --------------------------------------------------------------------------------------------------------------------------


def bare(text):
    """Lines of code without indentation, remarks and empty lines. Lines of `// ...` stay, as such."""
    lines = (line.strip() for line in text.splitlines())
    lines = ("// ..." if line.startswith("// ...") else re.sub(r"\s*//.*$", "", line) for line in lines)
    return [line for line in lines if line]


def whole(lines):
    return [line for line in lines if line != "// ..."]


def is_part(listing, program):
    """Whether the pieces of a listing stand in the program, one after the other."""
    at = 0
    for piece in "\n".join(listing).split("// ..."):
        piece = piece.strip("\n").split("\n")
        if piece == [""]:
            continue
        found = next((i for i in range(at, len(program) - len(piece) + 1) if program[i : i + len(piece)] == piece), None)
        if found is None:
            return False
        at = found + len(piece)
    return True


def missing_files(root, page):
    """What a page names and is not there: files and folders that it links to, and on the pages for authors also those that it names in other ways."""
    text = re.sub(r"`[^`]*`", "", FENCE.sub("", page.read_text()))
    names = {(page.parent / name).resolve() for name in re.findall(r"\]\((?!\w+:)([^)#]+)[^)]*\)", text)}
    if page.name.startswith("extending"):
        named = re.findall(r"(?:^|[` ])((?:tessera|tests|docs|recipes|examples)/[\w./-]+)", page.read_text(), re.M)
        names |= {root / name for name in named if "NAME" not in name}
    return sorted(f"{page.relative_to(root)} names {name}, which is not there" for name in names if not name.exists())


def too_long(root, page):
    """Pages that a test writes may be long, and so may tables."""
    name, lines = page.relative_to(root), page.read_text().splitlines()
    is_index = page.parent.name in ("examples", "bench")
    if len(lines) > LONGEST_PAGE and not is_index and "made from the test" not in page.read_text():
        yield f"{name} has {len(lines)} lines; at most {LONGEST_PAGE} are read to the end"
    fenced = False
    for number, line in enumerate(lines, 1):
        fenced ^= line.startswith("```")
        longest = LONGEST_LISTING if fenced and not is_index else LONGEST_LINE
        if len(line) > longest and not line.startswith("|"):
            yield f"{name}:{number} has {len(line)} columns; at most {longest}"


def faults_of_example(path):
    lines = path.read_text().splitlines()
    if len(lines) > LONGEST_EXAMPLE:
        yield f"examples/{path.name} has {len(lines)} lines; at most {LONGEST_EXAMPLE} are easy to read"
    if not re.match(rf"// .+: (.* )?{path.stem}( |;|$)", lines[0]):
        yield f"examples/{path.name}: the first line must say what it shows and how it is run, `// ...: tessera launch -n 2 {path.stem}`"


def orders_of_options(root):
    """A table lists the options of a struct in their order, and leaves none out."""
    headers = "".join(re.sub(r"//.*", "", path.read_text()) for path in (root / "tessera").rglob("*.h"))
    rows = re.findall(r"^\| `(\w+)` \| ((?:`\w+`(?:, )?)+) \|$", (root / "docs/sharding.md").read_text(), re.M)
    for struct, names in rows:
        body = re.search(rf"^struct {struct} \{{(.*?)^\}};", headers, re.M | re.S)
        fields = re.findall(r"(\w+)(?: = (?:\{[^}]*\}|[^;,{]*))?(?:;|, (?=\w+ =))", body[1]) if body else []
        if fields != names.replace("`", "").split(", "):
            yield f"docs/sharding.md: {struct} has the options {', '.join(fields)}"
    if len(rows) < 4:
        yield "docs/sharding.md has no table of options; has the way to write it changed?"


def check_listings(root):
    programs = {path.name: whole(bare(path.read_text())) for path in sorted((root / "examples").glob("*.cpp"))}
    own = sorted(path for path in (root / "tests/extending").rglob("*") if path.suffix in {".h", ".cpp", ".patch"})
    parts = {"cpp": [*programs.values(), *(whole(bare(path.read_text())) for path in own if path.suffix != ".patch")],
             "diff": [path.read_text().splitlines() for path in own if path.suffix == ".patch"]}
    wrong, seen = [said for page in pages_of(root) for said in (*missing_files(root, page), *too_long(root, page))], 0
    for page in pages_of(root):
        text = page.read_text()
        for match in FENCE.finditer(text):
            language = match.group(1)
            if language not in parts:
                continue
            seen += 1
            listing = bare(match.group(2)) if language == "cpp" else match.group(2).splitlines()
            line = text[: match.start()].count("\n") + 2
            if page.name == "README.md" and language == "diff":
                kept = bare("\n// ...\n".join(part[1:] for part in listing if not part.startswith("-")))
                if not any(is_part(kept, program) for program in programs.values()):
                    wrong.append(f"README.md:{line}: what this diff leads to is no part of a program in examples/")
            elif page.name == "README.md":
                if whole(listing) not in programs.values():
                    wrong.append(f"README.md:{line}: this listing is no program in examples/")
            elif not any(is_part(listing, program) for program in parts[language]):
                wrong.append(f"{page.relative_to(root)}:{line}: this listing is no part of a program in examples/ or of a file in tests/extending/")
    if seen < 10:
        wrong.append(f"only {seen} listings were found; has the way to mark them changed?")
    table = (root / "docs/tables/reference.md").read_text()
    for umbrella in ("tessera/tessera.h", "tessera/models.h", "tessera/vision.h", "tessera/extending.h"):
        for header in re.findall(r'#include "tessera/(.*)"', (root / umbrella).read_text()):
            if header.rsplit("/", 1)[-1] not in table:
                wrong.append(f"docs/tables/reference.md does not name {header}")
    version = re.search(r'TESSERA_VERSION "(.*)"', (root / "tessera/version.h").read_text())[1]
    for page, words in (("CITATION.cff", f"version: {version}"), ("CHANGELOG.md", f"## [{version}]")):
        if words not in (root / page).read_text():
            wrong.append(f"{page} does not say {words}")
    for entry in (root / "CHANGELOG.md").read_text().split("\n## ")[1:]:
        if len(entry.split()) > 600:
            wrong.append(f"CHANGELOG.md has {len(entry.split())} words about {entry.split()[0]}; 600 are enough")
    wrong += orders_of_options(root)
    authors = (root / "docs/extending.md").read_text()
    wrong += [f"docs/extending.md does not name {path.relative_to(root)}" for path in own if f"({'../' + path.relative_to(root).as_posix()})" not in authors]
    index = (root / "examples/README.md").read_text()
    for name in programs:
        if f"]({name})" not in index:
            wrong.append(f"examples/README.md does not name {name}")
        wrong += faults_of_example(root / "examples" / name)
    return wrong


# --- command lines ---------------------------------------------------------------------------------------------------------------------


def steps_of(page):
    """The files to write and the commands to run of a page, in order: (name, text) and (command, expected status, lines that it must print)."""
    text = page.read_text()
    for match in FENCE.finditer(text):
        before = text[: match.start()].rstrip().rsplit("\n", 1)[-1]
        if name := re.search(r"`([\w./]+)`:$", before):
            yield name.group(1), match.group(2)
        elif match.group(1) == "console":
            for part in re.split(r"^\$ ", match.group(2), flags=re.M)[1:]:
                command, *shown = part.splitlines()
                while command.endswith("\\"):
                    command = command[:-1] + shown.pop(0).strip()
                status = re.search(r"\s+# status (\d+)$", command)
                yield command[: status.start()] if status else command, int(status.group(1)) if status else 0, shown


def normal(line):
    return NUMBER.sub("0", " ".join(line.split())).replace("threads each", "thread each")


def missing(shown, printed):
    """The first line of the page that was not printed."""
    printed = [normal(line) for line in printed.splitlines()]
    bars = [words_in(line) for line in printed if "▕" in line]
    for line in shown:
        pattern = re.compile(".*".join(map(re.escape, normal(line).split("..."))))
        found = any(words_in(line) <= have for have in bars) if "▕" in line else any(pattern.fullmatch(have) for have in [*printed, ""])
        if not found:
            return line
    return None


def words_in(line):
    return set(re.findall(r"[a-z_]{3,}", line))


def run_on_terminal(command, folder, environment):
    """The status and the output of a command that is typed into a terminal, which shows other things than a pipe."""
    ours, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (50, 160))
    with subprocess.Popen(["bash", "-c", command], cwd=folder, env={**environment, "NO_COLOR": "1"}, stdin=terminal, stdout=terminal, stderr=terminal,
                          start_new_session=True) as process:
        os.close(terminal)
        printed = b""
        try:
            while part := os.read(ours, 65536):
                printed += part
        except OSError:  # how a terminal ends
            pass
        process.wait()
        os.close(ours)
    return process.returncode, re.sub(r"\r|\x1b\[[0-9;?]*[A-Za-z]", "\n", printed.decode().replace("\r\n", "\n"))


def run_commands(root, build, page):
    count = 0
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        for name, target in {"build": build, **{name: root / name for name in ("examples", "docs", "README.md")}}.items():
            (folder / name).symlink_to(target)
        # As a reader has it: ctest sets some variables for tests.
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "TESSERA_"))}
        # Other pages may be run at the same time, and only one may build.
        cmake = folder / "one-at-a-time/cmake"
        cmake.parent.mkdir()
        cmake.write_text(f'#!/bin/sh\nexec flock "{build}/one-at-a-time" "{shutil.which("cmake")}" "$@"\n')
        cmake.chmod(0o755)
        environment["PATH"] = f"{cmake.parent}:{environment['PATH']}"
        for step in steps_of(page):
            if len(step) == 2:
                (folder / step[0]).parent.mkdir(parents=True, exist_ok=True)
                (folder / step[0]).write_text(step[1])
                continue
            command, status, shown = step
            ended, printed = run_on_terminal(command, folder, environment)
            count += 1
            print(f"$ {command}\n{printed}", flush=True)
            if ended != status:
                return f"{page.name}: `{command}` ended with status {ended} instead of {status}"
            if (line := missing(shown, printed)) is not None:
                return f"{page.name}: `{command}` did not print: {line}"
    return None if count else f"{page.name} has no command lines; take it out of the tests, or mark them as console"


if __name__ == "__main__":
    what, root = sys.argv[1], pathlib.Path(sys.argv[2]).resolve()
    if what == "listings":
        wrong = check_listings(root)
    else:
        wrong = [said] if (said := run_commands(root, pathlib.Path(sys.argv[3]).resolve(), root / sys.argv[4])) else []
    print("\n".join(wrong) or "the pages are true")
    sys.exit(1 if wrong else 0)
