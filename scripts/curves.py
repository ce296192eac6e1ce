"""Draws docs/screens/curves.svg: the losses of examples/same_losses.cpp on one, two
and three ranks and in plain libtorch, and how far they are apart.

Needs what `cmake --build build --target same_losses tessera_cli` builds.
"""
import argparse
import math
import os
import pathlib
import subprocess

import svg

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAM, TEXT = ROOT / "build/examples/same_losses", ROOT / "docs/architecture.md"
LIMIT = 1e-3  # more than rounding can be
LEFT, TOP, HEIGHT = 50, 40, 150
WIDTH, BELOW = svg.WIDTH - LEFT - 20, TOP + HEIGHT + 44  # of a graph; where the second one begins
# Wide lines first, so that those that lie on them can be seen.
STYLES = {"plain libtorch": ("#b9c4c9", 9, ""), "1 rank": ("#2a7f62", 5, ""), "2 ranks": ("#e0a030", 2.5, ""), "3 ranks": ("#303a40", 1.2, "4 4")}


def losses(ranks):
    command = [PROGRAM, TEXT, "plain"] if not ranks else [ROOT / "build/bin/tessera", "launch", "--quiet", "-n", str(ranks), PROGRAM, TEXT]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}).stdout
    return [float(line.split()[-1]) for line in printed.splitlines()]


def line(values, low, high, top, style):
    colour, width, dashes = style
    points = " ".join(f"{LEFT + WIDTH * i / (len(values) - 1):.1f},{top + HEIGHT * (high - value) / (high - low):.1f}" for i, value in enumerate(values))
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-dasharray="{dashes}" stroke-linejoin="round"/>'


def axes(title, marks, low, high, top):
    yield f'<text x="{LEFT}" y="{top - 18}" class="head">{title}</text><path d="M{LEFT} {top}V{top + HEIGHT}H{LEFT + WIDTH}" class="axis"/>'
    for value, name in marks:
        y = top + HEIGHT * (high - value) / (high - low)
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" class="mark">{name}</text>'


def legend(styles):
    for i, (name, (colour, width, dashes)) in enumerate(styles.items()):
        x, y = LEFT + WIDTH - 110, TOP + 16 + 18 * i
        yield (f'<path d="M{x} {y - 4}h24" stroke="{colour}" stroke-width="{width}" stroke-dasharray="{dashes}"/>'
               f'<text x="{x + 32}" y="{y}">{name}</text>')


def picture(shapes, label, caption):
    """Two graphs, one below the other, as a file of SVG."""
    caption, bottom = svg.lines(caption, LEFT, BELOW + HEIGHT + 22)
    return svg.picture([*shapes, *caption], bottom, label)


def main():
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    curves = dict(zip(STYLES, map(losses, range(len(STYLES)))))
    plain = curves["plain libtorch"]
    apart = {name: [abs(a - b) for a, b in zip(values, plain, strict=True)] for name, values in curves.items() if values is not plain}
    worst = max(map(max, apart.values()))
    if worst > LIMIT:
        raise SystemExit(f"the losses are apart by {worst}, which is more than rounding")
    low, high = math.floor(min(plain)), math.ceil(max(plain))
    shapes = [*axes("loss of each step", [(value, value) for value in range(low, high + 1)], low, high, TOP)]
    shapes += [line(values, low, high, TOP, STYLES[name]) for name, values in curves.items()]
    shapes += axes("apart from plain libtorch", [(power, f"1e{power}") for power in (-8, -6, -4, -2)], -9, -1, BELOW)
    shapes += [line([math.log10(max(value, 1e-9)) for value in values], -9, -1, BELOW, STYLES[name]) for name, values in apart.items()]
    shapes += legend(STYLES)
    (ROOT / "docs/screens/curves.svg").write_text(
        picture(shapes, "Losses on one, two and three ranks and in plain libtorch lie on each other",
                f"{len(plain)} steps of a small gpt; at most {worst:.0e} apart, which is rounding"))
    print(f"wrote docs/screens/curves.svg: at most {worst:.1e} apart")


if __name__ == "__main__":
    main()
