"""No sample is in two splits: by its index or by its content."""

import pytest
import torch
from auxhead.model import sample_identities
from auxhead.model.calibration.samples import SHARES, as_identities, draw_splits, refuse_shared
from auxhead.model.network.learned_from import NEW, identities


def names(count):
    return [index.to_bytes(4, "big") for index in range(count)]


def test_drawn_splits_are_disjoint_and_have_all_samples():
    drawn = draw_splits(names(100), seed=3)
    assert {name: len(part) for name, part in drawn.items()} == {"temperature": 20, "thresholds": 50, "test": 30}
    assert torch.cat(list(drawn.values())).sort().values.tolist() == list(range(100))
    refuse_shared(names(100), drawn)


def test_a_seed_means_the_same_splits_and_equal_samples_are_drawn_together():
    first, same, other = (draw_splits(names(50), seed)["test"].tolist() for seed in (1, 1, 2))
    assert first == same != other
    samples = names(20) + names(20) + names(3)
    drawn = draw_splits(samples, 0)
    assert sum(map(len, drawn.values())) == 43
    refuse_shared(samples, drawn)


def test_each_split_has_a_sample_and_what_is_left_out_is_in_none():
    assert [len(part) for part in draw_splits(names(3), 0).values()] == [1, 1, 1]
    with pytest.raises(ValueError, match="data: got 2 different samples, wants at least one for each"):
        draw_splits(names(2) * 4, 0)
    drawn = draw_splits(names(10), 0, [0] * 3 + [NEW] * 7)
    assert torch.cat(list(drawn.values())).sort().values.tolist() == list(range(3, 10))


def test_shared_samples_are_refused():
    parts = {name: torch.arange(3) + 3 * number for number, name in enumerate(SHARES)}
    refuse_shared(names(9), parts)
    with pytest.raises(ValueError, match="temperature and test share 1 samples, such as sample 2; wants none"):
        refuse_shared(names(9), {**parts, "test": torch.tensor([2, 8])})
    with pytest.raises(ValueError, match="temperature and thresholds share 1 samples, such as samples 0 and 4, which"):
        refuse_shared([*names(4), names(1)[0], *names(9)[5:]], parts)


def test_identity_is_the_content_alone():
    images = torch.randn(3, 2, 4, 4)
    images[2] = images[0]
    found = identities(images)
    assert found[0] == found[2] != found[1]
    assert identities(images.contiguous(memory_format=torch.channels_last)) == found
    assert sample_identities([(images[:2], torch.zeros(2)), (images[2:], torch.zeros(1))]) == set(found)
    for batch, message in (
        (images, "yields Tensor, wants pairs"),
        ((images.to_sparse(), 0), "input: got a torch.sparse"),
    ):
        with pytest.raises(TypeError, match=f"^loader: {message}"):
            sample_identities([batch])
    assert len(identities(images.bfloat16())) == 3


def test_learned_samples_by_index_or_content():
    samples = [*names(4), names(1)[0]]  # the last one equals the first
    assert as_identities([0, 2], samples, by_index=True) == {samples[0], samples[2]}
    assert as_identities({samples[1]}, samples, by_index=False) == {samples[1]}
    for train, by_index, error, message in (
        ({1, 2}, True, TypeError, "train: got a set with int, wants one of sample_identities"),
        ([1], False, TypeError, "train: got list, wants a set of sample_identities where data is a dict"),
        ([5], True, ValueError, "train: got indices from 5 to 5, wants 0 to 4"),
        ([0.5], True, TypeError, "train: got torch.float32, wants indices"),
        ("all", True, TypeError, "train: got str, wants indices"),
        ({}, True, TypeError, r"train: got dict, wants .*; or sample_identities\(loader\), a set, which is empty if"),
        ([[1]], True, ValueError, r"train: got shape \[1, 1\], wants \[M\]"),
    ):
        with pytest.raises(error, match=message):
            as_identities(train, samples, by_index=by_index)
