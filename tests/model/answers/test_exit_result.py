"""``ExitResult``: a tuple of four parts, given or viewed in one piece of memory; exits merged sample by sample."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from auxhead.kernels import ExitBuffers, HeadOutput
from auxhead.kernels.exits import AnswerLayout
from auxhead.model.answers.exit_result import ExitArrays, ExitResult, first_sure, joined
from torch import Tensor
from torch.utils import _pytree


def output(place: int, sure: list[bool], classes: int = 3) -> HeadOutput:
    """An exit's answer for as many samples; all that it says tells exit and sample."""
    said = torch.arange(len(sure)) + 10 * place
    probs = said[:, None] + torch.arange(classes) / 10
    return HeadOutput(probs, said, said / 100, torch.tensor(sure))


@pytest.mark.parametrize("last", [[True] * 4, [False] * 4], ids=["sure", "unsure"])
def test_each_sample_takes_the_first_exit_that_is_sure_or_else_the_last(last: list[bool]) -> None:
    exits = [output(0, [True, False, False, True]), output(1, [True, True, False, False]), output(2, last)]
    found = first_sure(exits, with_probs=True)
    assert found.exit_index.tolist() == [0, 1, 2, 0] and found.exit_index.dtype == torch.int64
    for sample, place in enumerate([0, 1, 2, 0]):
        wanted = exits[place]
        assert found.label[sample] == wanted.label[sample] and found.confidence[sample] == wanted.confidence[sample]
        assert wanted.probs is not None and found.probs is not None
        assert torch.equal(found.probs[sample], wanted.probs[sample])
    assert exits[-1].exit.tolist() == last, "the answers given are left as they are"


SAMPLES, CLASSES = 5, 3
PARTS = ("label", "confidence", "probs", "exit_index")


def values(samples: int = SAMPLES, *, with_probs: bool = True) -> dict[str, Tensor | None]:
    probs = torch.rand(samples, CLASSES)
    return {
        "label": torch.randint(CLASSES, (samples,)),
        "confidence": torch.rand(samples),
        "probs": probs if with_probs else None,
        "exit_index": torch.randint(4, (samples,)),
    }


def packed(said: dict[str, Tensor | None], batch: int) -> tuple[Tensor, AnswerLayout]:
    """Memory for a batch, of which the first samples are those given, as kernels write it."""
    samples = len(said["label"])
    with_probs = said["probs"] is not None
    buffers = ExitBuffers.allocate(4, batch, CLASSES, with_probs=with_probs, device=torch.device("cpu"))
    buffers.packed_answer.fill_(255)
    label, exit_index, confidence, probs = buffers.answer(buffers.packed_answer)
    for into, name in ((label, "label"), (exit_index, "exit_index"), (confidence, "confidence"), (probs, "probs")):
        if into is not None:
            into[:samples] = said[name]
    return buffers.packed_answer, buffers.layout


def given(said: dict[str, Tensor | None]) -> ExitResult:
    return ExitResult(**{name: None if part is None else part.clone() for name, part in said.items()})


def viewed(said: dict[str, Tensor | None]) -> ExitResult:
    """The batch was padded."""
    return ExitResult.viewing(*packed(said, SAMPLES + 3), len(said["label"]))


@pytest.fixture(params=[given, viewed])
def make(request: pytest.FixtureRequest) -> Callable:
    return request.param


@pytest.fixture(params=[True, False], ids=["probs", "no probs"])
def with_probs(request: pytest.FixtureRequest) -> bool:
    return request.param


def assert_says(result: Sequence[Tensor | None], said: dict[str, Tensor | None]) -> None:
    assert len(result) == 4
    for name, one, other in zip(PARTS, result, said.values(), strict=True):
        assert (one is None) == (other is None), name
        if one is not None:
            assert torch.equal(one, other) and one.dtype == other.dtype and one.is_contiguous(), name


def test_parts_by_name_by_unpacking_and_by_index(make: Callable, with_probs: bool) -> None:
    said = values(1 if with_probs else SAMPLES, with_probs=with_probs)
    ways: list[Callable[[ExitResult], Sequence[Tensor | None]]] = [
        lambda result: [getattr(result, name) for name in PARTS],
        lambda result: [part for part in result],  # noqa: C416
        lambda result: (lambda label, confidence, probs, exit_index: [label, confidence, probs, exit_index])(*result),
        lambda result: [result[index] for index in range(4)],
        lambda result: result[:],
        lambda result: list(reversed(result))[::-1],
        lambda result: list(result._asdict().values()),
        tuple,
    ]
    for way in ways:
        assert_says(way(make(said)), said)
    result = make(said)
    assert result._fields == PARTS and list(result._asdict()) == list(PARTS) and isinstance(result[1:3], tuple)
    label, confidence, probs, exit_index = result
    assert label is result.label and confidence is result.confidence
    assert probs is result.probs and exit_index is result.exit_index


def test_errors_of_a_tuple(make: Callable) -> None:
    result = make(values())
    for index in (4, -5):
        with pytest.raises(IndexError):
            result[index]
    with pytest.raises(TypeError):
        result["label"]
    with pytest.raises(ValueError):
        label, confidence, probs = result  # noqa: F841  # one too few
    with pytest.raises(AttributeError):
        result.labels  # noqa: B018
    with pytest.raises(AttributeError):
        result.label = torch.zeros(SAMPLES)
    with pytest.raises(TypeError, match="labels"):
        result._replace(labels=torch.zeros(SAMPLES))


def test_other_parts_in_some_places(make: Callable, with_probs: bool) -> None:
    said = values(with_probs=with_probs)
    result = make(said)
    label = said["label"] + 1
    other = result._replace(label=label)
    assert type(other) is ExitResult and other.label is label
    assert_says(other, {**said, "label": label})
    assert_says(result, said)
    assert_says(result._replace(probs=None), {**said, "probs": None})
    assert_says(result._replace(), said)


COPIES = (copy.copy, copy.deepcopy, lambda result: pickle.loads(pickle.dumps(result)))


def test_copies(make: Callable, with_probs: bool) -> None:
    for copied in COPIES:
        said = values(with_probs=with_probs)
        result = make(said)
        other = copied(result)
        assert type(other) is ExitResult
        assert_says(other, said)
        if copied is not copy.copy:
            other.label.add_(1)
            other.exit_index.add_(1)
            assert_says(result, said)
        assert_says(copied(other)._replace(label=said["label"], exit_index=said["exit_index"]), said)


def test_a_tree_of_parts(make: Callable, with_probs: bool) -> None:
    """As PyTorch's transforms, compiler and exporter take it."""
    said = values(with_probs=with_probs)
    leaves, spec = _pytree.tree_flatten({"answer": make(said)})
    assert len(leaves) == 4 and sum(leaf is None for leaf in leaves) == (not with_probs)
    again = _pytree.tree_unflatten(leaves, spec)["answer"]
    assert type(again) is ExitResult
    assert_says(again, said)
    mapped = _pytree.tree_map(lambda leaf: leaf if leaf is None else leaf + 1, make(said))
    assert_says(mapped, {name: None if part is None else part + 1 for name, part in said.items()})
    nothing = _pytree.tree_map(lambda _leaf: None, make(said))  # as transforms say which of a tree's leaves are meant
    assert type(nothing) is ExitResult and list(nothing) == [None] * 4
    loaded = _pytree.treespec_loads(_pytree.treespec_dumps(spec))
    assert_says(_pytree.tree_unflatten(leaves, loaded)["answer"], said)


def test_on_the_cpu_it_is_itself_and_its_arrays_share_its_memory(make: Callable, with_probs: bool) -> None:
    said = values(with_probs=with_probs)
    result = make(said)
    assert_says(result.cpu(), said)
    assert make is given or result.cpu() is result
    arrays = result.numpy()
    assert isinstance(arrays, ExitArrays) and arrays._fields == PARTS
    for name, array in arrays._asdict().items():
        part = getattr(result, name)
        if part is None:
            assert array is None
            continue
        assert isinstance(array, np.ndarray) and np.array_equal(array, part.numpy()), name
        assert np.shares_memory(array, part.numpy()) and array.dtype == part.numpy().dtype, name
        part.add_(1)
        assert np.array_equal(array, (said[name] + 1).numpy()), name


def test_what_is_viewed_may_be_written_until_it_is_asked_for() -> None:
    memory, layout = packed(values(), SAMPLES)
    result = ExitResult.viewing(memory, layout, SAMPLES)
    said = values()
    memory.copy_(packed(said, SAMPLES)[0])
    assert_says(result, said)


def test_the_memory_goes_with_the_last_view() -> None:
    memory, layout = packed(values(), SAMPLES)
    memory = memory.clone()
    alive = weakref.ref(memory.untyped_storage())
    result = ExitResult.viewing(memory, layout, SAMPLES)
    del memory
    label = result.label
    del result
    gc.collect()
    assert alive() is not None and label.shape == (SAMPLES,)
    del label
    gc.collect()
    assert alive() is None


def test_an_iterable_of_parts_as_data_parallel_joins_them(with_probs: bool) -> None:
    """``torch.nn.parallel.gather`` calls the type of what it gathers with one iterable."""
    said = values(with_probs=with_probs)
    for parts in (list(said.values()), tuple(said.values()), iter(said.values()), given(said), viewed(said)):
        result = ExitResult(parts)
        assert type(result) is ExitResult
        assert_says(result, said)


def test_answers_are_joined_whatever_they_are_made_of(make: Callable, with_probs: bool) -> None:
    said = [values(samples, with_probs=with_probs) for samples in (2, 5, 1)]
    whole = joined([make(said[0]), viewed(said[1]), given(said[2])])
    wanted = {name: None if said[0][name] is None else torch.cat([one[name] for one in said]) for name in PARTS}
    assert_says(whole, wanted)
    assert not any(whole.label.data_ptr() == one["label"].data_ptr() for one in said)


@pytest.mark.parametrize("count", [0, 2, 3, 5])
def test_other_numbers_of_parts_are_refused(count: int) -> None:
    parts = (*values().values(), torch.zeros(3))[:count]
    for wrong in (parts, (list(parts),)):
        with pytest.raises(TypeError):
            ExitResult(*wrong)


def test_no_part_but_the_probabilities_may_be_missing() -> None:
    label, confidence, probs, _ = values().values()
    with pytest.raises(TypeError, match="ExitResult: got 3 parts, wants label, confidence, probs, exit_index"):
        ExitResult(label=label, confidence=confidence, probs=probs, exit_index=None)
