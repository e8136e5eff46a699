"""The site: every public name has one place in the reference and an example, and every page one in the contents."""

import ast
import json
import re
from dataclasses import is_dataclass
from importlib import import_module
from inspect import cleandoc, getsource
from textwrap import dedent

import auxhead.kernels
import auxhead.model
import pytest
from auxhead.plots.records import COMMITTED
from support.documents import ROOT, Document, documents, name_of, snippets

REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))


def described(module, pages=REFERENCE):
    """Names that the reference describes, of a module."""
    found = []
    for page in pages:
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
            if callable(value):
                assert value.__doc__ and re.match(r"[A-Z].+[.:]", value.__doc__.strip(), re.DOTALL), name


def test_every_field_of_a_described_class_says_what_it_is():
    """The site leaves out those that say nothing."""
    modules = {module for page in REFERENCE for module in re.findall(r"currentmodule:: (\S+)", page.read_text())}
    classes = [getattr(import_module(module), name) for module in modules for name in described(module)]
    fields = 0
    for one in classes:
        if not (is_dataclass(one) or hasattr(one, "_fields")):
            continue
        body = ast.parse(dedent(getsource(one))).body[0].body
        for field, after in zip(body, [*body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign):
                documented = isinstance(after, ast.Expr) or f"    {field.target.id}: " in one.__doc__
                assert documented, f"{one.__name__}.{field.target.id}"
                fields += 1
    assert fields > 100


def without_example(page, where, module):
    """Names of a module that a page describes, without an example in the docstring or a use in the page's code."""
    used = set()
    for snippet in snippets(page):
        used |= {node.id for node in ast.walk(ast.parse(snippet.code)) if isinstance(node, ast.Name)}
    docstrings = {name: getattr(module, name).__doc__ or "" for name in described(where, [page])}
    return [name for name, text in docstrings.items() if name not in used and "\nExample:\n" not in cleandoc(text)]


@pytest.mark.parametrize("where, module", [("auxhead", auxhead.model), ("auxhead.kernels", auxhead.kernels)])
@pytest.mark.parametrize("page", REFERENCE, ids=lambda page: page.stem)
def test_every_public_name_has_an_example(page, where, module):
    assert not without_example(page, where, module)


def test_a_name_in_an_import_or_a_comment_is_no_example(tmp_path, monkeypatch):
    monkeypatch.setattr("support.documents.ROOT", tmp_path)
    page = tmp_path / "page.md"
    names = ("decide", "merge", "attend", "fused_head")
    described = "\n".join(f".. autofunction:: {name}" for name in names)
    code = 'from auxhead.kernels import attend, decide, merge\nmerge  # decide\nprint("attend")'
    page.write_text(f"```python\n{code}\n```\n\n.. currentmodule:: auxhead.kernels\n\n{described}\n")
    assert without_example(page, "auxhead.kernels", auxhead.kernels) == ["decide", "attend", "fused_head"]


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
