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
    snippet.run()


def test_the_first_snippet_ends_in_an_answer(tmp_path, monkeypatch, without_interpreter):
    monkeypatch.chdir(tmp_path)
    first, *others = snippets(ROOT / "README.md")
    answer = first.run()["answer"]
    assert not others and answer.label.shape == answer.exit_index.shape == (8,)


def test_a_snippet_without_its_imports_is_found(tmp_path):
    """Each has a namespace of its own, and a failure names the line of the document."""
    document = tmp_path / "some.md"
    document.write_text(
        "Text.\n\n```python\nimport math\nx = math.pi\n```\n\n<!-- needs nosuch -->\n```python\nprint(x)\n```\n"
    )
    first, second = snippets(document)
    assert (first.line, first.needs, second.line, second.needs) == (4, None, 10, "nosuch")
    first.run()
    with pytest.raises(NameError) as failure:
        second.run()
    assert failure.traceback[-1].lineno + 1 == 10
