"""Every Python snippet of every document runs alone, on the CPU and on a GPU."""

import pytest
import torch
from support.documents import ROOT, Snippet, documents, snippets

ALL = [snippet for document in documents() for snippet in snippets(document)]


@pytest.mark.parametrize("where", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("snippet", ALL, ids=str)
def test_snippet_runs_alone(snippet: Snippet, where, tmp_path, monkeypatch, without_interpreter):
    """Snippets choose their device by ``torch.cuda.is_available``; what they write goes to a folder that is dropped."""
    if where == "gpu" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if where == "cpu" and snippet.needs == "a GPU":
        pytest.skip("needs a CUDA device, as the document says")
    if snippet.needs and snippet.needs != "a GPU":
        pytest.importorskip(snippet.needs)
    if where == "cpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    names = snippet.run()
    if snippet.document == ROOT / "README.md":  # it ends in a runner's answer for eight images
        assert names["answer"].label.shape == names["answer"].exit_index.shape == (8,)


def test_the_front_page_has_one_snippet():
    assert [snippet.needs for snippet in snippets(ROOT / "README.md")] == [None]


def test_a_snippet_without_its_imports_is_found(tmp_path, monkeypatch):
    """Each has a namespace of its own, and a failure names its place."""
    monkeypatch.setattr("support.documents.ROOT", tmp_path)
    document = tmp_path / "some.md"
    document.write_text("Text.\n\n```python\nimport math\n```\n\n<!-- needs nosuch -->\n```python\n\nmath.pi\n```\n")
    first, second = snippets(document)
    assert (str(first), first.needs) == ("some.md:4", None) and (str(second), second.needs) == ("some.md:9", "nosuch")
    first.run()
    with pytest.raises(NameError) as failure:
        second.run()
    assert str(failure.traceback[-1].path).endswith("some.md:9") and failure.traceback[-1].lineno + 1 == 2
