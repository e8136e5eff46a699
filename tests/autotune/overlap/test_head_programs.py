"""Head programs under the kernels of their replay: two clocks are aligned."""

import pytest
from auxhead.autotune.overlap.replays import Kernel, recorded_replay
from support.overlap_fakes import residency

#: What a device's clock shows, in nanoseconds since 1970: float64 has steps of 256 there.
NOW = 1_795_000_000_123_456_789


def kernel(role, start, us):
    name = "conv" if role == "trunk" else "exit_kernel"
    return Kernel(name, role, 7, start, us, (2, 1, 1), (128, 1, 1), 40)


REPLAY = (kernel("trunk", 0.0, 9.0), kernel("side", 2.0, 6.0), kernel("trunk", 9.0, 9.0), kernel("join", 20.0, 3.0))


def test_programs_are_centred_in_their_kernels():
    found = recorded_replay(
        REPLAY,
        [residency((3, 3.0, 4.0), (0, 2.5, 7.5), begin=NOW), residency((1, 20.5, 22.5), begin=NOW)],
        sm_count=4,
    )
    assert found.replay == REPLAY and found.clocks_differ_us == 0.0
    assert [tuple(one) for one in found.programs] == [(0, 0, 2.5, 7.5), (0, 3, 3.0, 4.0), (1, 1, 20.5, 22.5)]


def test_launches_that_pack_features_record_nothing():
    packs = (
        kernel("side", 1.0, 1.0)._replace(name="pack_kernel"),
        kernel("join", 19.0, 1.0)._replace(name="pack_kernel"),
    )
    replay = (REPLAY[0], packs[0], *REPLAY[1:3], packs[1], REPLAY[3])
    launches = [residency((0, 2.5, 7.5), begin=NOW), residency((1, 20.5, 22.5), begin=NOW)]
    assert recorded_replay(replay, launches, sm_count=4).programs == recorded_replay(REPLAY, launches, 4).programs


def test_clocks_that_disagree():
    """The middles are 5.0 and 21.5 to the profiler, and to the programs 0.25 earlier and 0.75 later."""
    found = recorded_replay(
        REPLAY, [residency((0, 2.25, 7.25), begin=NOW), residency((1, 21.0, 23.5), begin=NOW)], sm_count=4
    )
    assert found.clocks_differ_us == 1.0
    assert [tuple(one) for one in found.programs] == [(0, 0, 2.0, 7.0), (1, 1, 20.75, 23.25)]


@pytest.mark.parametrize(
    ("launches", "sm_count", "says"),
    [
        ([((1, 20.0, 21.0),)], 4, "launches: got 1 that recorded, wants the 2 of the replay"),
        ([((-1, 2.0, 3.0),), ((1, 20.0, 21.0),)], 4, "turns: 1 of 1 were not recorded"),
        ([((1, 20.0, 21.0),)] * 2, 1, "turns: got an SM of 1 that there is not"),
        ([((1, 3.0, 2.0),)] * 2, 4, "an end before its start"),
    ],
)
def test_programs_that_cannot_be(launches, sm_count, says):
    with pytest.raises(ValueError, match=says):
        recorded_replay(REPLAY, [residency(*turns, begin=NOW) for turns in launches], sm_count)
