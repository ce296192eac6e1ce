#!/usr/bin/env python3
"""Builds the site in build/site/html: the pages in docs/, and the reference of
all public headers. It is read and searched without a network.

site.py            installs the generators into build/site/python if they are
                   not there, and builds
site.py --pages    the pages alone, in seconds; the rest needs doxygen
site.py --serve    also serves it, at http://localhost:8000
site.py --links    asks for each address that a page links to (takes a network)
site.py --install  only installs

A link that leads nowhere and a page that no list names are errors.
"""
import argparse
import functools
import http.server
import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SITE = ROOT / "build/site"
PACKAGES = ["sphinx==8.2.3", "myst-parser==5.2.0", "furo==2025.12.19", "breathe==5.1.0"]


def install():
    """The folder of the generators' programs."""
    programs, done = SITE / "python/bin", SITE / "python/.packages"
    if not done.exists() or done.read_text().split() != PACKAGES:
        subprocess.run([sys.executable, "-m", "venv", SITE / "python"], check=True)
        subprocess.run([programs / "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES], check=True)
        done.write_text("\n".join(PACKAGES))
    return programs


def headers():
    """Of each folder of tessera/, the headers that the reference lists, and all models."""
    found = {}
    for cell in re.findall(r"^\| (`\w+/.*?) \|", (ROOT / "docs/tables/reference.md").read_text(), re.M):
        folder = ""
        for name in re.findall(r"`([\w/]+\.h)`", cell):
            # A name without a folder is beside the one before it, or below the same room.
            candidates = [name, f"{folder}/{name}", f"{folder.split('/')[0]}/{name}"]
            path = next(path for path in candidates if (ROOT / "tessera" / path).exists())
            folder = path.rpartition("/")[0]
            pages = found.setdefault(path.split("/")[0], [])
            pages += [] if path in pages else [path]
    found["models"] = sorted(f"models/{path.name}" for path in (ROOT / "tessera/models").glob("*.h"))
    return found


def stage(source, pages):
    """What Sphinx reads: the repository, and a page for the headers of each folder."""
    shutil.rmtree(source, ignore_errors=True)
    # Copies, because links between pages are followed to where they lie.
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns("build", ".*", "__pycache__"))
    (source / "api").mkdir()
    for folder, paths in pages.items():
        lines = [folder, "=" * len(folder), ""]
        for path in paths:
            title = f"tessera/{path}"
            lines += [title, "-" * len(title), "", f".. doxygenfile:: {title}", ""]
        (source / f"api/{folder}.rst").write_text("\n".join(lines))


def name_by_paths(xml):
    """Doxygen's index has the last part of a header's path alone, which headers of several folders share."""
    def whole(match):
        return match[1] + re.findall('<location file="([^"]+)"/>', (xml / f"{match[2]}.xml").read_text())[-1]
    index = xml / "index.xml"
    index.write_text(re.sub('(<compound refid="([^"]+)" kind="file"><name>)[^<]+', whole, index.read_text()))


def build(of_headers, builder="html"):
    if of_headers and not shutil.which("doxygen"):
        sys.exit("site.py needs doxygen for the reference: apt-get install doxygen; or build the pages alone: scripts/site.py --pages")
    programs, pages = install(), headers() if of_headers else {}
    environment = {**os.environ, "TESSERA_REFERENCE": str(SITE / "reference"),
                   "TESSERA_REFERENCE_HEADERS": " ".join(f"tessera/{path}" for paths in pages.values() for path in paths)}
    if pages:
        shutil.rmtree(SITE / "reference", ignore_errors=True)
        (SITE / "reference").mkdir(parents=True)
        subprocess.run(["doxygen", "docs/Doxyfile"], cwd=ROOT, env=environment, check=True)
        name_by_paths(SITE / "reference/xml")
    stage(SITE / "source", pages)
    options = ["--builder", builder, "--quiet", "--fresh-env", "--fail-on-warning", "--keep-going", "--conf-dir", ROOT / "docs/site"]
    if failed := subprocess.run([programs / "sphinx-build", *options, SITE / "source", SITE / builder], env=environment).returncode:
        sys.exit(failed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", action="store_true", help="without the reference of headers")
    parser.add_argument("--serve", action="store_true", help="serve it at http://localhost:8000")
    parser.add_argument("--links", action="store_true", help="ask for each address that a page links to")
    parser.add_argument("--install", action="store_true", help="only install the generators")
    options = parser.parse_args()
    if options.install:
        install()
        sys.exit()
    if options.links:
        sys.exit(build(of_headers=False, builder="linkcheck"))
    build(of_headers=not options.pages)
    print(f"the site is in {(SITE / 'html/index.html').relative_to(ROOT)}")
    if options.serve:
        http.server.test(functools.partial(http.server.SimpleHTTPRequestHandler, directory=SITE / "html"), bind="127.0.0.1")
