"""The pages of the documentation, *.md and docs/**/*.md: their code blocks, links and headings.

A fenced block says how it is checked by its language, its first line, and the comment on the line before it:

    ```python                       a part of the program of the page, which runs on one rank
    # ranks: 3                      as first line of a python block: a separate program, on three ranks
    <!-- not run: reason -->        before a python block: it cannot run where the tests do
    <!-- run -->                    before a sh block: its commands run, after those before it, in one folder
"""

import re
import textwrap
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]

FENCE = re.compile(r"^ *(`{3,})([^`]*)$")
COMMENT = re.compile(r"^ *<!-- *(.*?) *-->$")
RANKS = re.compile(r"# ranks: (\d+)$")
INLINE_CODE = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)")
HEADING = re.compile(r"^#{1,6} +(.*?) *#*$")


class Block(NamedTuple):
    """One fenced block."""

    page: Path
    line: int
    """The line of the page on which its code begins, from 1 on."""
    language: str
    comment: str
    """The text of the comment before it."""
    code: str

    @property
    def place(self) -> str:
        """The file and the line, as editors read them."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def reason(self) -> str | None:
        """Why it is not run; None if nothing is said."""
        found = re.fullmatch(r"not run: *(.*)", self.comment)
        return found and found[1]

    @property
    def ranks(self) -> int | None:
        """The number of ranks of a separate program; None if it belongs to the page's program."""
        found = RANKS.match(self.code.partition("\n")[0])
        return found and int(found[1])


class Page(NamedTuple):
    """A page, taken apart."""

    path: Path
    prose: str
    """Its text; lines of blocks are empty."""
    blocks: list[Block]
    """Its fenced blocks, without directives such as `{include}`."""

    @property
    def name(self) -> str:
        """Its path in the repository."""
        return str(self.path.relative_to(ROOT))

    @property
    def program(self) -> str:
        """Its python blocks as one program; each line has the same number as on the page."""
        lines = [""] * (self.prose.count("\n") + 1)
        for block in self.blocks:
            if block.language == "python" and block.reason is None and block.ranks is None:
                code = block.code.splitlines()
                lines[block.line - 1 : block.line - 1 + len(code)] = code
        return "\n".join(lines)

    @property
    def links(self) -> list[tuple[int, str]]:
        """(line, target) of its links and pictures."""
        text = INLINE_CODE.sub(lambda code: re.sub(r"[^\n]", "x", code[0]), self.prose)
        return [(text.count("\n", 0, link.start()) + 1, link[1]) for link in LINK.finditer(text)]

    @property
    def anchors(self) -> set[str]:
        """The anchors of its headings, by the rules of GitHub and MyST."""
        times: Counter[str] = Counter()
        found = set()
        for heading in filter(None, map(HEADING.match, self.prose.splitlines())):
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1])  # of a link, its text
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            found.add(f"{slug}-{times[slug]}" if times[slug] else slug)
            times[slug] += 1
        return found


def pages() -> list[Page]:
    """README.md and its neighbours, and everything below docs/ that is not built."""
    paths = [path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts]
    return [read(path) for path in sorted([*ROOT.glob("*.md"), *paths])]


def read(path: Path) -> Page:
    """Take a page apart."""
    prose: list[str] = []
    code: list[str] = []
    blocks: list[Block] = []
    ticks = language = comment = ""  # `ticks` are the backticks that opened the present block
    for line in path.read_text().splitlines():
        fence = FENCE.match(line)
        prose.append("" if ticks or fence else line)
        if ticks and not (fence and not fence[2].strip() and fence[1].startswith(ticks)):
            code.append(line)
        elif ticks:
            first = len(prose) - len(code)
            blocks.append(Block(path, first, language, comment, textwrap.dedent("\n".join(code)) + "\n"))
            ticks = comment = ""
        elif fence:
            ticks, language, code = fence[1], fence[2].strip(), []
        elif line.strip():
            said = COMMENT.match(line)
            comment = said[1] if said else ""
    assert not ticks, f"{path}: the block of {code[:1]} does not end"
    return Page(path, "\n".join(prose), [block for block in blocks if not block.language.startswith("{")])
