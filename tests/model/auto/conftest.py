"""Fixtures of the planner's tests."""

from pathlib import Path

import pytest
from support.planner_fakes import FakeGpu


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return FakeGpu(monkeypatch)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "plan.json"
