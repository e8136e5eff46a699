"""Snippets of documents, and the ``Example:`` in the docstring of each front door, run alone and do what they say."""

import doctest
from pathlib import Path

import auxhead.model
import pytest
import torch
import torchvision
from support.documents import ROOT, Snippet, documents, name_of, snippets
from support.pictures import write_image_folder
from torch import nn

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
        monkeypatch.setitem(auxhead.model.measure_exit_latencies.__kwdefaults__, "rounds", 3)  # in place of 30
    monkeypatch.chdir(tmp_path)
    of_pictures = 'ImageFolder("pictures"' in snippet.code
    if of_pictures:
        make_pretrained_weights_and_pictures(tmp_path, monkeypatch)
    names = snippet.run()
    if of_pictures:  # it ends in a runner's answer for what a batch of pictures is
        assert names["answer"].label.shape == names["answer"].exit_index.shape == (10,)
        assert names["network"].preprocessing == names["prepare"] and names["report"].bound.unknown is None
        assert (tmp_path / "my-network" / "model.json").exists()


def make_pretrained_weights_and_pictures(folder: Path, monkeypatch) -> None:
    """What a user of such a snippet has: pictures, and weights that torch.hub has fetched already."""
    write_image_folder(folder / "pictures", per_class=10, size=40)
    weights = folder / "hub" / "checkpoints" / Path(torchvision.models.ResNet18_Weights.DEFAULT.url).name
    weights.parent.mkdir(parents=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        torch.save(torchvision.models.resnet18().state_dict(), weights)
    monkeypatch.setattr(torch.hub, "_hub_dir", str(weights.parent.parent))


def test_the_ways_from_a_folder_of_pictures_are_run_on_one():
    of_pictures = [snippet for snippet in ALL if 'ImageFolder("pictures"' in snippet.code]
    assert {name_of(snippet.document) for snippet in of_pictures} == {"README.md", "docs/pictures.md"}


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


FRONT_DOORS = (
    "attach", "attach_exits", "accelerate", "make_runner", "train", "calibrate_network", "anytime_curve",
    "save_checkpoint", "load_checkpoint", "fuse_aux_heads", "FusedAuxHead", "EarlyExitNetwork", "export_decision",
)  # fmt: skip


@pytest.mark.usefixtures("without_interpreter")
@pytest.mark.filterwarnings("ignore:The classifier is not shown to be better than chance")
def test_the_example_of_every_front_door(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each sees the public names of ``auxhead.model``, torch, torchvision, nn, and a ``folder`` of its own."""
    public = {name: getattr(auxhead.model, name) for name in auxhead.model.__all__}
    runner = doctest.DocTestRunner()
    for name in FRONT_DOORS:
        text = public[name].__doc__
        scope = {**public, "torch": torch, "torchvision": torchvision, "nn": nn, "folder": tmp_path / name}
        examples = doctest.DocTestParser().get_doctest(text, scope, name, None, 0)
        assert "\n    Example:\n" in text and examples.examples, f"{name} has no example"
        torch.manual_seed(0)
        with torch.random.fork_rng(devices=[]):
            failed = runner.run(examples).failed
        assert not failed, capsys.readouterr().out
