"""Turn the listing of Debian's `bible` program into the training text of the demo.

    bible -f mt1:1-rev22:21 | python make_extract.py > kjv_extract.txt

The listing holds one verse a line, each behind a reference such as ``1Cor13:4``. The extract keeps the words of
each verse unchanged, one verse a line, and replaces the references by one heading a chapter (``1 Corinthians 13``).
"""

import re
import sys
from collections.abc import Iterable, Iterator

#: The program's abbreviations of the books of the New Testament, in the order of the text.
BOOKS = {
    "Mat": "Matthew",
    "Mark": "Mark",
    "Luke": "Luke",
    "John": "John",
    "Acts": "Acts",
    "Rom": "Romans",
    "1Cor": "1 Corinthians",
    "2Cor": "2 Corinthians",
    "Gal": "Galatians",
    "Eph": "Ephesians",
    "Phi": "Philippians",
    "Col": "Colossians",
    "1Th": "1 Thessalonians",
    "2Th": "2 Thessalonians",
    "1Tim": "1 Timothy",
    "2Tim": "2 Timothy",
    "Titus": "Titus",
    "Phmn": "Philemon",
    "Heb": "Hebrews",
    "Jas": "James",
    "1Pet": "1 Peter",
    "2Pet": "2 Peter",
    "1Jn": "1 John",
    "2Jn": "2 John",
    "3Jn": "3 John",
    "Jude": "Jude",
    "Rev": "Revelation",
}
VERSE = re.compile(r"(?P<book>\d?[A-Za-z]+)(?P<chapter>\d+):(?P<verse>\d+) (?P<words>\S.*)")


def extract(listing: Iterable[str]) -> Iterator[str]:
    """The lines of the extract, without line ends, for the lines of a listing.

    Raises ValueError at a line that is not one verse of a book in ``BOOKS`` or that breaks the count of verses.
    """
    chapter_before, verse_before = "", 0
    for number, line in enumerate(listing, start=1):
        match = VERSE.fullmatch(line.rstrip("\n"))
        if match is None or match["book"] not in BOOKS:
            raise ValueError(f"line {number} is not a verse of the New Testament in the form 'Mat1:1 words': {line!r}")
        chapter = f"{BOOKS[match['book']]} {match['chapter']}"
        verse_expected = verse_before + 1 if chapter == chapter_before else 1
        if int(match["verse"]) != verse_expected:
            raise ValueError(f"line {number}: expected verse {verse_expected} of {chapter}, found {match['verse']}")
        if chapter != chapter_before:
            if chapter_before:
                yield ""
            yield chapter
            yield ""
        yield match["words"]
        chapter_before, verse_before = chapter, verse_expected


if __name__ == "__main__":
    sys.stdout.writelines(line + "\n" for line in extract(sys.stdin))
