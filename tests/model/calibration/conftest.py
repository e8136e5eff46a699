"""A trained network, and samples that it has not learned from."""

import pytest
from support.digits_network import batches, digits, trained_state, untrained


@pytest.fixture
def network():
    made = untrained()
    made.load_state_dict(trained_state())
    return made.eval()


@pytest.fixture
def held_out():
    images, labels = digits()
    return batches(images[500:], labels[500:])
