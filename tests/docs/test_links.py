"""Links and pictures of the documents lead to files and headings that there are."""

import re

import pytest
from support.distributions import MADE
from support.documents import ROOT, TASK_PAGES, documents, name_of, text_of, without_fences, words_of

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def anchors(text: str) -> set[str]:
    """The names by which GitHub links to the headings of a document."""
    headings = re.findall(r"^#+ +(.+?) *$", without_fences(text), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", documents(), ids=name_of)
def test_links_lead_somewhere(document):
    for target in LINK.findall(without_fences(text_of(document))):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        if str(file).startswith(tuple(f"{ROOT}/{name}" for name in MADE)):
            continue
        assert file.exists(), f"{name_of(document)} links to {target}"
        assert ROOT in file.parents or file == ROOT, f"{name_of(document)} links to {target}, outside of the project"
        if anchor:
            assert anchor in anchors(text_of(file)), f"{name_of(document)} links to {target}"


def test_the_front_page_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_page_of_the_rooms_of_model_is_short():
    assert len((ROOT / "model" / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", TASK_PAGES)
def test_a_task_page_is_read_in_twenty_minutes(page):
    text = (ROOT / page).read_text()
    assert len(words_of(text)) <= 800
    assert re.search(r"^(```|    \S)", text, flags=re.MULTILINE), f"{page} shows nothing to write"


@pytest.mark.parametrize("page", ["pictures", "own_exits", "text"])
def test_what_is_read_before_a_first_success_is_400_words(page):
    """From the front page, on which one learns where to go, to the end of what stands behind a page's first snippet."""
    front = text_of(ROOT / "docs" / "index.md").partition("\n## Why")[0]
    assert f"({page}.md)" in front
    to_the_snippet, snippet, behind = text_of(ROOT / "docs" / f"{page}.md").partition("\n```\n")
    comments = re.findall(r"#(.*)", to_the_snippet)
    done = behind.index("The rest of this page is for when")
    read = f"{front}\n{to_the_snippet}{snippet}{behind[:done]}"
    assert len(words_of(read)) + len(" ".join(comments).split()) <= 400


def test_words_in_fences_and_tables_do_not_count():
    assert words_of("Two words\n```python\nimport this\n```\n| a | table |\n\nand three more\n") == [
        "Two", "words", "and", "three", "more",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "folder", ["kernels", "model", "docs/guides", "autotune", "autotune/records", "plots", "plots/gallery"]
)
def test_folder_has_a_page(folder):
    assert (ROOT / folder / "README.md").is_file()
