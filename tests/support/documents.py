"""The project's reading matter: its Markdown files, and the snippets, commands and tables in them."""

import linecache
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]

#: A line before a snippet that names what the snippet needs: "a GPU", or a package that may not be installed.
_NEEDS = re.compile(r"<!-- needs (.+?) -->\s*$")


def documents() -> list[Path]:
    """Every Markdown file of the project, at the top and in its folders."""
    folders = ("docs", "kernels", "model", "autotune", "plots", "tests")
    return sorted([*ROOT.glob("*.md"), *(path for folder in folders for path in (ROOT / folder).rglob("*.md"))])


def name_of(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


class Snippet(NamedTuple):
    """A fence of Python."""

    document: Path
    line: int
    """Of its first line of code, from 1."""
    code: str
    needs: str | None
    """What it cannot run without: "a GPU", or the name of a package."""

    def __str__(self) -> str:
        return f"{name_of(self.document)}:{self.line}"

    def run(self) -> dict[str, object]:
        """Run it in a namespace of its own; a traceback shows its lines, under the place of the snippet."""
        lines = self.code.splitlines(keepends=True)
        linecache.cache[str(self)] = (len(self.code), None, lines, str(self))
        names: dict[str, object] = {"__name__": "snippet"}
        exec(compile(self.code, str(self), "exec"), names)
        return names


def snippets(document: Path) -> list[Snippet]:
    """Every fence of Python in a document."""
    text = document.read_text()
    found = []
    for fence in re.finditer(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE):
        before = text[: fence.start()]
        needs = _NEEDS.search(before)
        found.append(Snippet(document, before.count("\n") + 2, fence[1], needs[1] if needs else None))
    return found


def without_fences(text: str) -> str:
    """Blank the fenced blocks of a document, line by line, so that line numbers stay."""
    return re.sub(r"^```.*?^```$", lambda fence: "\n" * fence[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)


class Document:
    """A document whose numbers are compared with records."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.text = (ROOT / name).read_text()
        self._words = " ".join(self.text.split())

    def says(self, words: str) -> None:
        """Fail unless the document holds these words, wherever its lines break."""
        assert words in self._words, f"{self.name} wants: {words}"

    def has_table(self, heading: str, rows: list[str]) -> None:
        """Fail unless the document has one table under this row of headings, and these are its rows."""
        assert self.text.count(heading) == 1, f"{self.name} wants one table under {heading!r}"
        dashes, *found = self.text.partition(heading)[2].partition("\n\n")[0].strip().splitlines()
        assert set(dashes) <= set("|-: "), dashes
        wanted = "\n".join(rows)
        assert found == rows, f"{self.name} wants under {heading!r}:\n{wanted}"
