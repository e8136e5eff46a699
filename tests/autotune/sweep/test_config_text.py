"""Configurations as text."""

import dataclasses

import pytest
from auxhead.autotune.sweep.config_text import changes, parse, text
from auxhead.kernels import LaunchConfig
from hypothesis import given
from hypothesis import strategies as st

powers = st.integers(0, 11).map(lambda bits: 1 << bits)
configs = st.builds(
    LaunchConfig,
    **{**{field.name: powers for field in dataclasses.fields(LaunchConfig)}, "waits": st.booleans()},
)
BASE = LaunchConfig(1, 16, 1, 64, 1, 256, 4, 1024, 1, stages=1, num_warps=4)


@given(configs)
def test_text_and_back(config):
    assert parse(text(config)) == config
    bare = dataclasses.replace(config, waits=False, max_registers=0, max_programs=0)
    assert parse(text(bare)) == bare and "registers" not in text(bare) and "waits" not in text(bare)


def test_text():
    assert text(BASE) == "n1-c16-p1-a64-f1-k256-s4-j1024-parts1-stages1-warps4"
    capped = dataclasses.replace(BASE, max_registers=64, max_programs=32)
    assert text(capped) == "n1-c16-p1-a64-f1-k256-s4-j1024-parts1-stages1-warps4-registers64-programs32"


@pytest.mark.parametrize(
    "written", ["", "n1", text(BASE) + "-x1", text(BASE).replace("c16", "c16-c16"), "c16-" + text(BASE)]
)
def test_other_texts_are_refused(written):
    with pytest.raises(ValueError, match="config: got .*, wants the like of 'n1-c32-"):
        parse(written)


def test_changes():
    assert changes(BASE, BASE) == "as by rule"
    other = dataclasses.replace(BASE, block_c=32, num_warps=8, max_programs=64)
    assert changes(other, BASE) == "c32 warps8 programs64"
    assert changes(BASE, other) == "c16 warps4 programs0"
