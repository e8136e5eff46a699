"""Fixture of tests whose ranks are processes."""

import pytest
from support.replica_cases import serve


@pytest.fixture(scope="module")
def server(without_interpreter):
    """The server that ranks are forked from, with PyTorch imported."""
    serve()
