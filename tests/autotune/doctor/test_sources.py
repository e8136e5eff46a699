"""Places of findings in words: an exact line, the function that one is in, and a script."""

import pytest
from auxhead.autotune.doctor.sources import place_in_words


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("steps.py:65", "at steps.py:65"),
        ("steps.py:57 in forward", "in forward, which begins at steps.py:57"),
        ("my folder in use/steps.py:57 in forward", "in forward, which begins at my folder in use/steps.py:57"),
        ("train.py in <module>", "in train.py"),
    ],
)
def test_a_place_is_part_of_a_sentence(line, words):
    assert place_in_words(line) == words
