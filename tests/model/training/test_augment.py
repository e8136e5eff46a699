"""Random changes of pictures in training: what they do, that they repeat, and that processes draw the same."""

import pytest
import torch
from auxhead.model.training.augment import AUGMENTATIONS, augmented, random_shift


def pictures(count=8, channels=3, size=32):
    """Each with a bright left half."""
    made = torch.randint(0, 60, (count, channels, size, size), dtype=torch.uint8)
    made[..., : size // 2] += 150
    return made


def drawn(kind, pixels, seed=0, own=slice(None)):
    return augmented(pixels, kind, torch.Generator().manual_seed(seed), own)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", AUGMENTATIONS)
def test_a_seed_means_the_same_for_all_processes_and_devices(kind, channels, device):
    """And random numbers of others go on as before."""
    pixels = pictures(channels=channels)
    before = torch.get_rng_state()
    found = drawn(kind, pixels)
    assert torch.equal(torch.get_rng_state(), before)
    assert found.shape == pixels.shape and found.dtype == torch.uint8
    assert torch.equal(drawn(kind, pixels), found)
    parts = [drawn(kind, pixels, own=slice(rank, None, 2)) for rank in (0, 1)]
    assert torch.equal(torch.stack(parts, 1).flatten(0, 1), found)
    assert (kind == "none") == torch.equal(found, pixels) == torch.equal(drawn(kind, pixels, 1), found)
    on_device = drawn(kind, pixels.to(device)).cpu()
    assert (on_device.float() - found.float()).abs().mean() < 2.0, "resizing rounds"


def test_the_generator_goes_on_by_the_whole_batch_whatever_part_is_wanted():
    for kind in AUGMENTATIONS:
        after = []
        for own in (slice(None), slice(0, 1)):
            generator = torch.Generator().manual_seed(0)
            augmented(pictures(), kind, generator, own)
            after.append(torch.rand(1, generator=generator).item())
        assert after[0] == after[1], kind


def test_standard_flips_half_of_the_pictures_and_cuts_parts_and_trivial_changes_colours_too():
    pixels = pictures(200)
    found = drawn("standard", pixels).float()
    left_is_bright = found[..., :4].mean((1, 2, 3)) > found[..., -4:].mean((1, 2, 3)) + 50
    right_is_bright = found[..., -4:].mean((1, 2, 3)) > found[..., :4].mean((1, 2, 3)) + 50
    assert 40 < left_is_bright.sum() < 120 and 40 < right_is_bright.sum() < 120
    assert found.amax() <= 215, "no colour is changed"
    assert drawn("trivial", pixels).amax() > 215


def test_random_shift_crops_each_picture_from_a_black_border():
    pixels = torch.randint(1, 256, (64, 3, 6, 5), dtype=torch.uint8)
    shifted = random_shift(pixels, 2, torch.Generator().manual_seed(0))
    assert shifted.shape == pixels.shape and shifted.dtype == torch.uint8
    padded = torch.nn.functional.pad(pixels, (2, 2, 2, 2))
    found = set()
    for place in range(64):
        fits = [
            (dy, dx)
            for dy in range(5)
            for dx in range(5)
            if torch.equal(shifted[place], padded[place, :, dy : dy + 6, dx : dx + 5])
        ]
        assert len(fits) == 1
        found.add(fits[0])
    assert len(found) > 15  # of 25
    assert random_shift(pixels, 0, torch.Generator()) is pixels
