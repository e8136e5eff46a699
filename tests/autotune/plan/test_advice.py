"""What to take on several GPUs, by made-up facts of one: every way out, in figures and in words."""

import pytest
from auxhead.autotune.plan import advice as advice_module
from auxhead.autotune.plan import devices
from auxhead.autotune.plan.advice import Advice, advise
from auxhead.autotune.plan.devices import Facts
from auxhead.model.commands.console import plain_console

pytestmark = pytest.mark.usefixtures("without_interpreter")
GIB = 2**30
#: Four segments of 2 GiB on a GPU of 139, which take a hundred microseconds a sample beside two hundred.
FACTS = Facts(
    best={1: ("gated", 1_300.0), 64: ("overlapped (1 fork) on cudnn", 27_000.0)},
    free=139 * GIB,
    held=[2 * GIB] * 4,
    us={size: [200.0 + 100.0 * size] * 4 for size in (1, 8, 64)},
    at_work={size: [size * GIB // 64] * 4 for size in (1, 8, 64)},
    handed=[2e6, 1e6, 1e6],
    ends=["a", "b", "c"],
    uncuttable={},
    shared={},
    trunk="cudnn",
)
#: The same segments with more parameters than a GPU has room for.
LARGE = FACTS._replace(best={}, held=[60 * GIB] * 4)


@pytest.fixture(autouse=True)
def quick_hosts(monkeypatch):
    for module in (devices, advice_module):
        monkeypatch.setattr(module, "HOST_US", 300.0)


def ways(advice: Advice) -> list[tuple[int, str, int]]:
    return [(row.batch, row.way, row.gpus) for row in advice.rows]


def said(advice: Advice) -> str:
    return " ".join(advice.sentences)


def test_what_fits_is_run_on_one_gpu_or_on_each():
    advice = advise(FACTS, 2, [1, 64])
    assert ways(advice) == [
        (1, "one GPU", 1),
        (1, "replicas", 2),
        (1, "parallelize", 2),
        (1, "pipelined, split_size 1", 2),
        (64, "one GPU", 1),
        (64, "replicas", 2),
        (64, "parallelize", 2),
        (64, "pipelined, split_size 16", 2),
    ]
    assert [row.known for row in advice.rows] == ["measured", *["predicted"] * 3] * 2
    one, replicas, whole, piped = advice.rows[4:]
    assert one.us == replicas.us == 27_000 and replicas.samples_s == 2 * one.samples_s == pytest.approx(128 / 0.027)
    assert whole.us == 27_000, "the same work takes no less in parts"
    # five turns of two segments and a link that each micro-batch goes over, and the hosts
    assert piped.us == pytest.approx(5 * (2 * 1_800 + 10 + 16e6 / 200e3) + 4 * 300)
    assert advice.sentences[0] == (
        "It fits on one GPU: 8.0 GiB of parameters and buffers, about 1.0 GiB at work in batches of 64; 139.0 GiB are "
        "free. Take one GPU for the soonest answer (gated, overlapped (1 fork) on cudnn), and for the most samples a "
        "second replicas, a process for each of 2 GPUs, with the whole network in each."
    )
    assert "A batch of 64 is predicted to be answered sooner by a pipeline than by one GPU, but" in said(advice)
    assert 'trunk="cudnn"' in said(advice) and "in batches of 1, 8, 64, linearly between" in said(advice)
    assert "Assumed: links of 200 GB/s and 10 us, 0.3 ms of the hosts for each micro-batch." in said(advice)
    assert "sooner by a pipeline" not in said(advise(FACTS, 2, [1]))


def test_a_table_of_80_columns(capsys: pytest.CaptureFixture[str]):
    advise(FACTS, 8, [1, 64]).show(plain_console(200), "a network on 8 GPUs")
    advise(LARGE._replace(ends=["a" * 30, "b" * 30, "c" * 30]), 4, [4096]).show(plain_console(200), "a network")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    first = next(line.split() for line in lines if "measured" in line)
    assert first == ["1", "one", "GPU", "1", "1.30", "769", "measured"]


def test_what_does_not_fit_is_split():
    advice = advise(LARGE, 2, [1, 64])
    assert ways(advice) == [
        (1, "parallelize", 2),
        (1, "pipelined, split_size 1", 2),
        (64, "parallelize", 2),
        (64, "pipelined, split_size 16", 2),
    ]
    assert {row.known for row in advice.rows} == {"predicted"}
    assert advice.rows[2].us == pytest.approx(4 * 6_600 + 10 + 64e6 / 200e3)
    assert advice.sentences[:3] == [
        "It does not fit on one GPU, which ran out of memory: 240.0 GiB of parameters and buffers, about 1.0 GiB at "
        "work in batches of 64; 139.0 GiB are free.",
        'Take parallelize for batches below 16: one process for 2 GPUs, cut behind b (balance="auto").',
        "Take pipelined from batches of 16 on: a process for each of 2 GPUs, for 64 samples with split_size=16, cut "
        'behind b (stages="auto").',
    ]


def test_from_where_a_pipeline_pays_it_answers_more_and_below_it_does_not():
    for batch, pays in ((8, False), (16, True), (32, True)):
        whole, piped = advise(LARGE, 2, [batch]).rows
        assert (piped.samples_s > whole.samples_s) == pays


def test_a_pipeline_that_never_pays():
    slow_links = LARGE._replace(us={1: [0.1] * 4, 4096: [1.0] * 4}, at_work={1: [0] * 4, 4096: [0] * 4})
    advice = advise(slow_links, 2, [64])
    assert "Take parallelize: one process for 2 GPUs" in said(advice) and "pipelined" not in said(advice)
    assert "A pipeline is predicted to answer no batch of up to 4,096 sooner." in said(advice)


def test_where_only_micro_batches_have_room():
    """Of a batch of one there is a part for each GPU, of two there is none."""
    advice = advise(LARGE._replace(at_work={size: [18 * size * GIB] * 4 for size in (1, 8, 64)}), 2, [64])
    assert ways(advice) == [(64, "pipelined, split_size 1", 2)]
    assert 'Take parallelize for batches below 2: one process for 2 GPUs, cut behind b (balance="auto").' in said(
        advice
    )
    assert "Take pipelined from batches of 2 on" in said(advice)


def test_a_batch_that_is_too_large_may_be_smaller():
    advice = advise(FACTS._replace(best={}, free=17 * GIB // 2), 2, [64])
    assert "Batches of up to 32 may fit: try --batch 32." in said(advice) and len(advice.rows) == 2


def test_no_part_can_end_anywhere():
    facts = LARGE._replace(held=[240 * GIB], us={}, at_work={}, handed=[], ends=[], uncuttable={"a": "it is passed by"})
    advice = advise(facts, 2, [64])
    assert advice == Advice(
        [],
        [
            "It does not fit on one GPU, which ran out of memory: 240.0 GiB of parameters and buffers; 139.0 GiB are "
            "free.",
            "It cannot be split into 2 parts, 1 at most: parts can end at no tap; not at a: it is passed by.",
        ],
    )


def test_too_few_taps():
    advice = advise(FACTS._replace(uncuttable={"d": "why"}), 5, [1])
    assert ways(advice) == [(1, "one GPU", 1), (1, "replicas", 5)]
    (_, why) = advice.sentences
    assert why == "It cannot be split into 5 parts, 4 at most: parts can end at a, b, c; not at d: why."


def test_not_on_so_many_gpus():
    advice = advise(LARGE._replace(free=100 * GIB), 2, [1])
    assert not advice.rows and advice.sentences[1:] == [
        "It does not fit on 2 GPUs either: of its 4 segments the largest takes 60.0 GiB for one sample. Take more "
        "GPUs, or heads at more taps."
    ]
    assert advise(LARGE._replace(free=100 * GIB), 4, [1]).rows


def test_a_segment_that_has_no_room_alone():
    advice = advise(LARGE._replace(us={}, at_work={}), 4, [1])
    assert not advice.rows and "a segment alone, of 60.0 GiB at most, ran out of memory in a batch of 1" in said(advice)


def test_parts_share_no_parameter():
    assert advise(LARGE._replace(shared={"embed.weight": [0, 1]}), 2, [1]).rows
    advice = advise(LARGE._replace(shared={"embed.weight": [0, 3]}), 2, [1])
    assert not advice.rows and "cut behind b, as it balances, two would read 'embed.weight'" in said(advice)
