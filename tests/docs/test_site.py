"""The site: every public name has one place in the reference, and every page one in the contents."""

import json
import re

import auxhead.kernels
import auxhead.model
import pytest
from auxhead.plots.records import COMMITTED
from support.documents import ROOT, Document, documents, name_of

REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))


def described(module):
    """Names that the reference describes, of a module."""
    found = []
    for page in REFERENCE:
        text, current = page.read_text(), None
        for directive, name in re.findall(r"^\.\. (currentmodule|auto\w+|data):: (\S+)$", text, re.MULTILINE):
            if directive == "currentmodule":
                current = name
            elif current == module:
                found.append(name)
    return found


@pytest.mark.parametrize("where, module", [("auxhead", auxhead.model), ("auxhead.kernels", auxhead.kernels)])
def test_every_public_name_is_described_once(where, module):
    names = {*module.__all__} - ({*auxhead.kernels.__all__} if where == "auxhead" else set())
    assert sorted(described(where)) == sorted(names)


def test_every_public_name_says_what_it_is():
    for module in (auxhead.model, auxhead.kernels):
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value) and name not in ("Answer", "fused_conv2d_operator"):
                assert value.__doc__ and re.match(r"[A-Z].+[.:]", value.__doc__.strip(), re.DOTALL), name


def contents(page):
    """The pages of the tables of contents of a page, and of theirs."""
    found = []
    for table in re.findall(r"^```\{toctree\}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
        for line in table.splitlines():
            if line and not line.startswith(":"):
                below = next(page.parent.glob(f"{line}.*"), page.parent / f"{line}.md").resolve()
                found += [below, *(contents(below) if below.suffix == ".md" and below.exists() else [])]
    return found


def test_every_page_stands_in_the_contents_once():
    found = contents(ROOT / "docs" / "index.md")
    made = ROOT / "docs" / "reference" / "commands.md"  # by the build
    assert len(found) == len(set(found)) and all(page.exists() for page in found if page != made)
    assert {*map(name_of, documents())} - {"docs/index.md"} <= {name_of(page) for page in found}


def test_versions_on_gpus_are_those_of_the_records():
    found = set()
    for path in COMMITTED.glob("h*/*.jsonl"):
        for line in path.read_text().splitlines():
            of = json.loads(line)["environment"]
            cudnn = divmod(of["cudnn"], 10_000)
            cudnn = f"{cudnn[0]}.{cudnn[1] // 100}.{cudnn[1] % 100}"
            found.add((of["gpu"], of["torch"], of["triton"], of["cuda"], cudnn, of["driver"]))
    page = Document("docs/details/guarantees.md")
    table = page.text.partition("| where | torch |")[2].partition("\n\n")[0]
    rows = {tuple(cell.strip() for cell in line.split("|")[1:7]) for line in table.splitlines() if "| NVIDIA" in line}
    assert rows == found
