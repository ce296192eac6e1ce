"""Frames of the charts in docs: on paper that is dark on dark pages, and so narrow that a phone shows their letters at 9 pixels."""
import textwrap

WIDTH = 460
STYLE = ("text{font:12px sans-serif;fill:#444}.head{font-weight:bold}.name,.mark{text-anchor:end}.where{fill:#666}.own{fill:#2a7f62}.other{fill:#b9c4c9}"
         ".axis{fill:none;stroke:#999}"
         "@media(prefers-color-scheme:dark){text{fill:#d1d7e0}.where{fill:#9198a1}.paper{fill:#151b23}.own{fill:#3fa37f}.other{fill:#59636e}[stroke=\"#303a40\"]{stroke:#fff}}")


def lines(text, x, y):
    """A text of several lines, and the y below them."""
    parts = textwrap.wrap(text, (WIDTH - x) // 7)
    return [f'<text x="{x}" y="{y + 16 * i}" class="where">{part}</text>' for i, part in enumerate(parts)], y + 16 * len(parts)


def picture(shapes, height, label):
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">\n<style>{STYLE}</style>\n'
            '<rect width="100%" height="100%" rx="6" fill="#fff" class="paper"/>\n' + "\n".join(shapes) + "\n</svg>\n")
