#!/usr/bin/env python3
"""Writes tessera/data/unicode_table.cpp: what Hugging Face's library tokenizers
takes characters for, asked of the package itself, so that texts are cut where
it cuts them.

scripts/unicode_table.py   run it by a Python with the newest tokenizers:
                           build/python/bin/python scripts/unicode_table.py
"""
import pathlib
import re
import string

from tokenizers import Regex, pre_tokenizers

TABLE = pathlib.Path(__file__).resolve().parent.parent / "tessera/data/unicode_table.cpp"
CATEGORIES = "Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Co".split()  # and what is in none of them is Cn
# Properties that are no union of categories, less the categories that they hold as a whole.
BESIDE = {"Alphabetic": r"[\p{Alphabetic}&&[^\p{L}\p{Nl}]]", "Uppercase": r"[\p{Uppercase}&&[^\p{Lu}]]", "Lowercase": r"[\p{Lowercase}&&[^\p{Ll}]]"}
SCRIPTS = "Arabic Armenian Bengali Cyrillic Devanagari Georgian Greek Han Hangul Hebrew Hiragana Katakana Khmer Lao Latin Myanmar Tamil Telugu Thai".split()
SURROGATES = (0xD800, 0xDFFF)  # no characters of a text, so the package can't be asked
ALL = "".join(chr(c) for c in range(0x110000) if not SURROGATES[0] <= c <= SURROGATES[1])
WIDTH = 110


def ranges(expression):
    """The characters, as pairs of the first and the last of a row."""

    def character(place):
        return place if place < SURROGATES[0] else place + 0x800

    pieces = pre_tokenizers.Split(Regex(f"{expression}+"), "removed", invert=True).pre_tokenize_str(ALL)
    for _, (begin, end) in pieces:
        first, last = character(begin), character(end - 1)
        if first < SURROGATES[0] <= last:
            yield first, SURROGATES[0] - 1
            yield SURROGATES[1] + 1, last
        else:
            yield first, last


def lengths(found):
    """As the header describes them."""
    text, behind = "", 0
    for first, last in found:
        for length in (first - behind, last + 1 - first):
            if 0 < length <= len(string.ascii_letters):
                text += string.ascii_letters[length - 1]
            else:
                text += " " * text[-1:].isdigit() + str(length)
        behind = last + 1
    return re.sub(r"([a-zA-Z])\1{3,}(?=(\d?))", lambda m: f"{m[1]}*{len(m[0]) - 1}" + " " * bool(m[2]), text)


def main():
    expressions = {category: rf"\p{{{category}}}" for category in CATEGORIES} | BESIDE | {script: rf"\p{{{script}}}" for script in SCRIPTS}
    sets = {name: lengths(ranges(expression)) for name, expression in expressions.items()} | {"Cs": lengths([SURROGATES])}
    text = [
        "// Which characters are letters, numbers and so on, for cutting texts as Hugging Face's library does. Made by scripts/unicode_table.py;",
        "// don't change it by hand.",
        '#include "tessera/data/character_set.h"',
        "",
        "namespace tessera::data {",
        "namespace {",
        "",
        "// clang-format off",
        "constexpr NamedCharacters kAll[] = {",
    ]
    for name, found in sets.items():
        parts = [found[begin : begin + WIDTH] for begin in range(0, len(found), WIDTH)]
        text += [f'  {{"{name.lower()}",'] + [f'   "{part}"' for part in parts]
        text[-1] += "},"
    text += ["};", "// clang-format on", "", "}  // namespace", "", "const std::span<const NamedCharacters> kNamedCharacters = kAll;", "", "}  // namespace tessera::data"]
    TABLE.write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
