"""Kernels compile for GPUs that are not here, to machine code as wanted and as it was measured."""

import json
from pathlib import Path

import pytest
from support.compiler_process import printed

triton = pytest.importorskip("triton")

#: Made by support/machine_code_digests.py. Instructions are as many, and the same, as at kernel ebb8260d3f761adb, which
#: tables were measured with; since then parameters of a head alone lie elsewhere, and registers have other numbers.
DIGESTS = json.loads((Path(__file__).parent / "machine_code.json").read_text())
#: How often a head of each kind waits for what others send.
WAITS = {
    "split, the last to arrive adds up": 0,
    "split, the last one waits": 1,
    "tiles, few programs for all": 2,
    "tiles of 16 samples, maps in 4 parts": 3,
    "tiles of 16 samples": 2,
    "tiles of 16 samples, weight in shared memory": 2,
    "packed": 1,
    "in place": 1,
}
#: Kilobytes of shared memory that a program may have, by compute capability: of A100, B200, RTX 5090 (as of L4 and RTX
#: 4090; CUDA C++ Programming Guide, technical specifications per compute capability).
SHARED_KB = {"80": 163, "100": 227, "120": 99}


@pytest.mark.parametrize("capability", SHARED_KB)
def test_heads_compile_for_gpus_they_were_not_measured_on(capability, tmp_path):
    """As the rule launches them, which knows an H200 alone."""
    made = printed("compile_launches.py", tmp_path, capability)
    assert 0 < max(one["shared"] for one in made.values()) <= 1024 * SHARED_KB[capability]


@pytest.mark.parametrize("capability", ["90", *SHARED_KB])
def test_kernels_of_trunks_compile_for_gpus(capability, tmp_path):
    """A branch in their loop would stop loads from running ahead, and take twice as long."""
    made = printed("compile_convolutions.py", tmp_path, capability)
    kernels = {"attention_kernel", "convolution_kernel", "depthwise_kernel", "max_pool_kernel"}
    assert {one["kernel"] for one in made} == kernels
    for one in made:
        assert one["shared"] <= 1024 * SHARED_KB.get(capability, 227)
        assert one["copies"] >= 2 * one.get("stages", 0), "of both operands, in the loop and before it"
        waits = capability != "80" and one["kernel"] != "max_pool_kernel"
        assert one["before the wait"] == (0 if waits else None), "what is read is not there yet"


def test_every_way_to_launch_a_head(tmp_path):
    """Triton may repeat a wait for each layout that its numbers are used in: right, but several times as slow."""
    made = printed("compile_launches.py", tmp_path, "90")
    packs = {name: one for name, one in made.items() if name.startswith("features of ")}
    assert {name: made[name]["waits"] for name in WAITS} == WAITS and len(made) == len(WAITS) + 10 + len(packs)
    assert {*packs} == {f"features of {name}" for name in made if name.startswith("packed")} and len(packs) == 4
    for one in packs.values():
        assert one["waits"] == 0 and 4 * one["REG"] * 32 * one["warps"] <= 65_536, "many programs read at a time"
    for name, one in made.items():
        assert 2 * one["REG"] * 32 * one["warps"] <= 65_536, "or no two programs fit on a multiprocessor"
        assert one["STACK"] <= 64
        assert one["torn warps"] == 0, "a warp is left in pieces"
        assert one["shared"] <= 227 * 1024
        # at start and end, and the multiprocessor: nobody pays for residency who has not asked for it
        assert one["clocks"] == 3 * ("recorded" in name)
    # a tile without a step, too, sends nothing before all its threads have the statistics, which are cleared then
    assert made["in place, a norm"]["meetings"] == 1 + made["in place"]["meetings"]
    plain, ahead = (made[f"tiles of 16 samples{more}"]["copies"] for more in ("", ", weight in shared memory"))
    assert ahead >= plain + 3, "the weight for two steps before the loop and one in it"
    assert made["packed"]["copies"] >= 6 and made["in place"]["copies"] >= 3, "and the features, of 49 positions alone"


@pytest.mark.skipif(triton.__version__ != "3.6.0", reason="another Triton compiles otherwise")
def test_max_prob_is_what_records_and_tables_were_measured_with(tmp_path):
    """If it is not, sweep again and promote; then commit what the script prints now."""
    assert printed("machine_code_digests.py", tmp_path) == DIGESTS
