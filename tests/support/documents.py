"""The project's reading matter: its Markdown files and notebooks, and the snippets, commands and tables in them."""

import json
import linecache
import re
from pathlib import Path
from typing import NamedTuple

from support.distributions import MADE, ROOT

#: A line before a snippet that names what the snippet needs: "a GPU", or a package that may not be installed.
_NEEDS = re.compile(r"<!-- needs (.+?) -->\s*$")


def documents() -> list[Path]:
    """Every Markdown file of the project, at the top and in its folders, and every notebook."""
    folders = ("docs", "kernels", "model", "autotune", "plots", "tests")
    below = [*(path for folder in folders for path in (ROOT / folder).rglob("*.md")), *ROOT.glob("docs/guides/*.ipynb")]
    return sorted([*ROOT.glob("*.md"), *(path for path in below if not name_of(path).startswith(MADE))])


def text_of(document: Path) -> str:
    """The Markdown of a document: of a notebook its cells, code in fences."""
    if document.suffix != ".ipynb":
        return document.read_text()
    cells = json.loads(document.read_text())["cells"]
    texts = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    parts = [f"```python\n{text}\n```" if kind == "code" else text for kind, text in texts]
    return "\n\n".join(parts).replace("-->\n\n```", "-->\n```") + "\n"


#: Pages for users' tasks, each read in twenty minutes.
TASK_PAGES = (
    "docs/pictures.md", "docs/own_exits.md", "docs/text.md", "docs/thresholds.md", "docs/run.md", "docs/pays.md",
    "docs/several_gpus.md", "docs/tune.md", "docs/doctor.md",
    "docs/serve.md", "docs/export.md",
)  # fmt: skip


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
    text = text_of(document)
    found = []
    for fence in re.finditer(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE):
        before = text[: fence.start()]
        needs = _NEEDS.search(before)
        found.append(Snippet(document, before.count("\n") + 2, fence[1], needs[1] if needs else None))
    return found


def without_fences(text: str) -> str:
    """Blank the fenced blocks of a document, line by line, so that line numbers stay."""
    return re.sub(r"^```.*?^```$", lambda fence: "\n" * fence[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)


def words_of(text: str) -> list[str]:
    """The words of a document that are read as sentences: those outside of fences and tables."""
    return [word for line in without_fences(text).splitlines() if not line.startswith("|") for word in line.split()]


class Document:
    """A document whose numbers are compared with records."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.text = text_of(ROOT / name)
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
