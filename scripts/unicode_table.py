#!/usr/bin/env python3
"""Writes tessera/data/unicode_table.cpp: what Hugging Face's library tokenizers
takes characters for, asked of the package itself, so that texts are cut where
it cuts them.

scripts/unicode_table.py   run it by a Python with the newest tokenizers:
                           build/python/bin/python scripts/unicode_table.py
"""
import pathlib

from tokenizers import Regex, pre_tokenizers

TABLE = pathlib.Path(__file__).resolve().parent.parent / "tessera/data/unicode_table.cpp"
CATEGORIES = "Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Cs Co Cn".split()
# Properties that are no union of categories, less the categories that they hold as a whole.
BESIDE = {"Alphabetic": r"[\p{Alphabetic}&&[^\p{L}\p{Nl}]]", "Uppercase": r"[\p{Uppercase}&&[^\p{Lu}]]", "Lowercase": r"[\p{Lowercase}&&[^\p{Ll}]]"}
SCRIPTS = "Arabic Armenian Bengali Cyrillic Devanagari Georgian Greek Han Hangul Hebrew Hiragana Katakana Khmer Lao Latin Myanmar Tamil Telugu Thai".split()
ALL = "".join(chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000)
WIDTH = 150


def ranges(expression):
    """The characters, as pairs of the first and the last of a row."""

    def character(place):
        return place if place < 0xD800 else place + 0x800

    pieces = pre_tokenizers.Split(Regex(f"{expression}+"), "removed", invert=True).pre_tokenize_str(ALL)
    result = []
    for _, (begin, end) in pieces:
        first, last = character(begin), character(end - 1)
        if first < 0xD800 <= last:  # the surrogates, which are no characters of a text
            result += [(first, 0xD7FF), (0xE000, last)]
        else:
            result.append((first, last))
    return result


def lines(entries):
    line = " "
    for entry in entries:
        if len(line) + len(entry) > WIDTH:
            yield line
            line = " "
        line += f" {entry},"
    yield line


def main():
    of = {0xD800: "Cs"}
    for category in CATEGORIES:
        if category != "Cs":
            of |= {first: category for first, _ in ranges(rf"\p{{{category}}}")}
    text = [
        "// Made by scripts/unicode_table.py; don't change it by hand.",
        '#include "tessera/data/unicode_table.h"',
        "",
        "namespace tessera::data {",
        "namespace {",
        "",
        "// clang-format off",
        f"enum : uint8_t {{ {', '.join(CATEGORIES)} }};",
        "",
        "constexpr CategoryRun kRuns[] = {",
        *lines(f"{{{first:#x},{category}}}" for first, category in sorted(of.items())),
        "};",
    ]
    names = {}
    for name, expression in [*BESIDE.items(), *((script, rf"\p{{{script}}}") for script in SCRIPTS)]:
        text += [f"constexpr CharacterRange k{name}[] = {{", *lines(f"{{{first:#x},{last:#x}}}" for first, last in ranges(expression)), "};"]
        names[name] = f'{{"{name.lower()}", k{name}}}'
    text += [
        "constexpr NamedRanges kProperties[] = {",
        *lines(names[name] for name in BESIDE),
        "};",
        "constexpr NamedRanges kScripts[] = {",
        *lines(names[name] for name in SCRIPTS),
        "};",
        f"constexpr std::string_view kCategories[] = {{{', '.join(chr(34) + category.lower() + chr(34) for category in CATEGORIES)}}};",
        "// clang-format on",
        "",
        "}  // namespace",
        "",
        "const UnicodeTable kUnicodeTable = {.runs = kRuns, .categories = kCategories, .beside = kProperties, .scripts = kScripts};",
        "",
        "}  // namespace tessera::data",
    ]
    TABLE.write_text("\n".join(text) + "\n")
    print(f"{TABLE}: {len(of)} runs")


if __name__ == "__main__":
    main()
