# Settings of Sphinx for the site that scripts/site.py builds.
import os
import re
import shutil
import pathlib

project = "Tessera"
copyright = "the authors of Tessera"
extensions = ["myst_parser", "breathe"]
root_doc = "README"
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
include_patterns = ["*.md", "docs/*.md", "docs/tables/*.md", "bench/*.md", "examples/*.md", "api/*.rst"]

myst_heading_anchors = 3  # as code hosts make them
breathe_projects = {"tessera": os.environ["TESSERA_REFERENCE"] + "/xml"}
breathe_default_project = "tessera"
cpp_maximum_signature_line_length = 100
primary_domain = "cpp"
highlight_language = "none"
suppress_warnings = ["misc.highlighting_failure", "duplicate_declaration.cpp"]

html_theme = "furo"
html_title = "Tessera"
html_logo = html_favicon = "../logo.svg"
html_copy_source = html_show_sphinx = html_show_copyright = False
html_show_search_summary = False  # it would fetch pages, which a browser does not do for files
html_static_path = ["static"]
html_css_files = ["site.css"]


def groups_of(text):
    """The pages under each heading of docs/README.md."""
    for part in re.split(r"^## ", text, flags=re.M)[1:]:
        title, _, body = part.partition("\n")
        yield title, [os.path.normpath(f"docs/{page}") for page in dict.fromkeys(re.findall(r"\]\(([\w./-]+\.md)\)", body))]


def add_contents(app, docname, source):
    """The tree of pages is what docs/README.md lists; the reference leads to the pages of each header."""
    folder = pathlib.Path(app.srcdir)
    if docname == "README":
        groups = list(groups_of((folder / "docs/README.md").read_text()))
        groups[0][1].insert(0, "docs/README.md")
        if headers := sorted(f"api/{page.name}" for page in folder.glob("api/*.rst")):
            groups.insert(2, ("API", headers))
        groups.append(("Project", sorted(page.name for page in folder.glob("*.md") if page.name != "README.md") + ["examples/README.md"]))
        for title, pages in groups:
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n" + "\n".join(pages) + "\n```\n"
    if docname == "docs/tables/reference" and any(folder.glob("api/*.rst")):
        source[0] = re.sub(r"^\| `(\w+)/", r"| [\1](../../api/\1.rst) `\1/", source[0], flags=re.M)


def add_index(app, error):
    if not error:
        shutil.copy(pathlib.Path(app.outdir) / "README.html", pathlib.Path(app.outdir) / "index.html")


def setup(app):
    app.connect("source-read", add_contents)
    app.connect("build-finished", add_index)
