"""pictures.py ROOT: every picture in docs is readable on dark pages and on a phone of 360 pixels, and shows something where nothing moves.

Of each SVG file: it has a viewBox and a label; text lies on paper that fills the picture, or has colours for dark pages; letters are at least 7 pixels high when
the picture is 360 pixels wide; text that begins inside of it does not leave it; something is visible before any animation has begun, and at its beginning; what
moves stops for those who ask for less motion. Files of pixels have 15 to 150 kB. Pages show each picture that is there.
"""
import pathlib
import re
import sys
import xml.etree.ElementTree as ET

PHONE, LEAST, SMALLEST, MOST = 360, 7, 15_000, 150_000
WIDE = 0.45  # of a letter's height: the least that letters take on average
UNMADE = "not made yet"


def tag(element):
    return element.tag.rpartition("}")[2]


def starts_hidden(group):
    """Whether an animation hides it at its beginning."""
    return any(tag(child) == "set" and child.get("to") == "hidden" and re.fullmatch(r"(\w+\.begin)?(\+?0(\.0*)?s)?", child.get("begin", "0s")) for child in group)


def seen(root, known):
    """The texts and shapes that are visible at the beginning, whether anything moves or not. `known`: elements by id."""
    for child in root:
        if child.get("visibility") == "hidden" or starts_hidden(child) or tag(child) == "defs":
            continue
        yield child
        yield from seen(known[child.get("href")[1:]] if tag(child) == "use" else child, known)


def faults_of(path):
    text = path.read_text()
    if UNMADE in text:
        return [f"is {UNMADE}: run scripts/screens.py {path.stem}"]
    root = ET.fromstring(text)
    box = [float(value) for value in root.get("viewBox", "").split()]
    if len(box) != 4:
        return ["has no viewBox"]
    width, height = box[2:]
    visible = list(seen(root, {element.get("id"): element for element in root.iter()}))
    style = "".join(element.text or "" for element in root.iter() if tag(element) == "style")
    texts = [element for element in root.iter() if tag(element) == "text"]
    found = [] if root.get("aria-label") else ["has no aria-label"]
    papers = [rect for rect in root if tag(rect) == "rect" and rect.get("fill", "none") != "none" and
              (rect.get("width") == "100%" or float(rect.get("width")) >= width - 2) and (rect.get("height") == "100%" or float(rect.get("height")) >= height - 2)]
    if texts and not papers and "prefers-color-scheme" not in style:
        found.append("has text, but neither paper behind it nor colours for dark pages")
    sizes = [float(size) for size in re.findall(r"(?:font(?:-size)?:|font-size=\")\s*([\d.]+)(?:px|\")?", text)]
    if texts and (not sizes or min(sizes) * PHONE / width < LEAST):
        found.append(f"has letters of {min(sizes, default=0) * PHONE / width:.1f} pixels on a phone; at least {LEAST} are readable")
    for element in texts:
        letters = "".join(element.itertext())
        long = float(element.get("textLength") or len(letters) * WIDE * min(sizes, default=0))
        if element.get("class") not in ("name", "mark") and float(element.get("x", 0)) + long > width:
            found.append(f"has text that leaves it: {letters}")
    if not any(tag(element) in ("text", "path", "polyline") or tag(element) == "rect" and element not in papers for element in visible):
        found.append("shows nothing at its beginning")
    moves = any(tag(element) in ("animate", "set", "animateTransform") for element in root.iter()) or "@keyframes" in text
    if moves and "prefers-reduced-motion" not in style:
        found.append("moves for those who ask for less motion")
    if moves and sum(tag(element) == "text" for element in visible) < 3:
        found.append("shows nearly nothing where nothing moves")
    return found


def main(root):
    docs = root / "docs"
    pictures = sorted(path for path in docs.rglob("*") if path.suffix in (".svg", ".png") and "site" not in path.relative_to(docs).parts)
    pages = "".join(page.read_text() for page in [root / "README.md", *docs.rglob("*.md")])
    wrong = []
    for path in pictures:
        name = path.relative_to(root)
        if path.suffix == ".svg":
            wrong += [f"{name} {fault}" for fault in faults_of(path)]
        elif not SMALLEST <= path.stat().st_size <= MOST:
            wrong.append(f"{name} has {path.stat().st_size} bytes, and not {SMALLEST} to {MOST}; scripts/screens.py {path.stem} makes it")
        if path.name not in pages:
            wrong.append(f"{name} is on no page")
    if not pictures:
        wrong.append("there are no pictures")
    sys.exit("\n".join(wrong) or None)


main(pathlib.Path(sys.argv[1]))
