"""choose_config.py: overrides come first, then the device's tuned table, then the rule."""

import contextvars
import dataclasses
import importlib
import re
import threading

import pytest
import torch
from auxhead.kernels import ExitBuffers, ExitHead, ExitLaunch, LaunchConfig, fused_head, runs_triton
from auxhead.kernels.launch import tuned_table
from auxhead.kernels.launch.choose_config import choose_config, overriding
from auxhead.kernels.launch.head_shape import HeadShape
from auxhead.kernels.launch.head_view import head_view
from auxhead.kernels.launch.launch_rule import (
    config_beside_trunk,
    config_by_rule,
    config_of_reading,
)
from auxhead.kernels.launch.library_rule import config_of_library
from auxhead.kernels.launch.tuned_table import config_from, table_path
from auxhead.kernels.reference.hidden_layers import NO_LAYERS, HiddenLayers
from support.example_tables import DEVICE, FILE_NAME, TAPS, entry, head_shape, other, table, write
from support.head_cases import check_head, make_head

choosing = importlib.import_module("auxhead.kernels.launch.choose_config")
CPU = torch.device("cpu")


def choose(shape, device=CPU, **options):
    dtype, pool_max = getattr(torch, shape.dtype), shape.pool == "max"
    return choose_config(shape.view, shape.classes, pool_max=pool_max, dtype=dtype, device=device, **options)


def test_the_table_comes_before_the_rule(tables, monkeypatch):
    shape, missing = head_shape(classes=1000), head_shape(classes=999)
    write(tables, table(entry(shape, config=other(shape))))
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda asked: {device: DEVICE}[asked])
    assert choose(shape, device) == choose(shape, device, beside_trunk=True) == other(shape)
    assert choose(missing, device) == config_by_rule(missing)
    assert choose(shape) == config_by_rule(shape), "another device"


def test_a_table_may_say_of_one_linear_layer_that_a_library_multiplies_it(tables):
    """A head with further layers, whose rows the table takes for classes, is launched by rule."""
    shape = head_shape((512, 1, 1), samples=8, classes=100)
    config = config_of_library(shape, 100)
    assert config_from(vars(config), shape) == config
    for name, value in {"waits": True, "block_f": 16, "window_parts": 2, "last_rows": 64, "num_warps": 32}.items():
        with pytest.raises(ValueError, match=f"{name}: got {value}, wants .* where a library multiplies"):
            config_from({**vars(config), name: value}, shape)
    write(tables, table(entry(shape, config=config), device="cpu"), "cpu.json")

    def chosen(classes, hidden=NO_LAYERS):
        return choose(shape._replace(classes=classes), hidden=hidden)

    assert chosen(100) == config and not chosen(101).by_library
    assert not chosen(100, HiddenLayers(eps=1e-5)).by_library
    assert not chosen(10, HiddenLayers(weight=torch.empty(100, 512))).by_library


def test_overrides_come_first_and_are_forgotten(tables):
    shape, elsewhere = head_shape(), head_shape(TAPS[1])
    write(tables, table(entry(shape, config=other(shape)), device="cpu"), "cpu.json")
    forced, inner = other(shape, num_warps=1), other(shape, num_warps=8)
    assert choose(elsewhere) == config_by_rule(elsewhere)  # remembered before anything is overridden
    with overriding({shape: forced}):
        assert choose(shape) == forced and choose(elsewhere) == config_by_rule(elsewhere)
        with overriding({elsewhere: inner}):
            assert choose(shape) == forced and choose(elsewhere) == inner
        assert choose(elsewhere) == config_by_rule(elsewhere)
    assert choose(shape) == other(shape)
    with pytest.raises(RuntimeError, match="stop"), overriding({shape: forced}):
        raise RuntimeError("stop")
    assert choose(shape) == other(shape)


def test_overrides_are_those_of_a_thread(tables):
    shape = head_shape()
    found = []
    with overriding({shape: other(shape)}):
        thread = threading.Thread(target=lambda: found.append(choose(shape)), name="other")
        thread.start()
        thread.join()
        inherited = contextvars.copy_context().run(choose, shape)
    assert found == [config_by_rule(shape)] and inherited == other(shape)


#: Of one sample programs that multiply what others pool, tiles of 16, and programs that multiply what they pool.
SINGLE = LaunchConfig(1, 32, 1, 16, 64, 64, 1, 1024, 1, 1, 4)
TILES, SPLIT = (dataclasses.replace(SINGLE, **changes) for changes in ({"block_n": 16}, {"block_f": 1}))


@pytest.mark.parametrize("classes", [10, 1000])
@pytest.mark.parametrize("samples", [3, 4, 15, 16])
def test_programs_that_wait_to_multiply_are_few_beside_a_trunk(samples, classes, tables):
    """Of 4 to 15 samples and many classes none for one sample, of 16 none, by table or rule; all else is as alone."""
    shape = head_shape(TAPS[3], samples, classes=classes)
    replaced = config_beside_trunk(shape, SINGLE)
    packed = config_of_reading(shape, "packed")
    if samples < 4 or classes == 10:
        assert replaced == SINGLE
    elif samples < 16:
        assert replaced.way == "split" and config_from(vars(replaced), shape) == replaced
        assert samples * replaced.splits_of(shape.view) >= 16
    else:
        assert replaced == packed
    assert config_beside_trunk(shape, TILES) == (packed if samples == 16 and classes == 1000 else TILES)
    in_steps = dataclasses.replace(packed, block_s=4)
    for config in (SPLIT, config_of_library(shape, classes), packed, in_steps):
        assert config_beside_trunk(shape, config) == config
    single = shape._replace(dtype="float32")
    assert config_beside_trunk(single, SINGLE) == SINGLE, "it would take more registers"
    write(tables, table(entry(shape, config=SINGLE), device="cpu"), "cpu.json")
    assert choose(shape) == SINGLE and choose(shape, beside_trunk=True) == replaced
    with overriding({shape: SINGLE}):
        assert choose(shape, beside_trunk=True) == SINGLE, "taken as given"


def test_heads_by_rule_hidden_layers_and_norms_beside_a_trunk(tables):
    shape = head_shape(samples=8, classes=1000)
    alone, beside = (choose(shape, beside_trunk=trunk) for trunk in (False, True))
    assert (alone.block_n, alone.way, beside.way) == (1, "tiled", "split")
    hidden = HiddenLayers(weight=torch.empty(1000, 64))  # the weight that reads the features is as large
    alone, beside = (choose(shape._replace(classes=10), hidden=hidden, beside_trunk=trunk) for trunk in (False, True))
    assert (alone.way, beside.way) == ("tiled", "split")
    assert beside.block_j == 1024 and beside.num_warps <= 4, "fitted to all hidden features at once"
    norm = HiddenLayers(eps=1e-5)
    alone, beside = (choose(shape, hidden=norm, beside_trunk=trunk) for trunk in (False, True))
    assert alone == beside and (alone.block_n, alone.way) == (1, "tiled")


@pytest.mark.parametrize(
    "samples, classes, shared",
    [(8, 4096, False), (8, 4097, True), (9, 8192, False), (9, 8193, True)],
)
def test_programs_share_decisions_about_few_samples_of_many_classes(samples, classes, shared):
    shape = head_shape((192, 1, 1), samples=samples, classes=classes)
    assert config_by_rule(shape).surveys_of(classes) == shared


@pytest.mark.parametrize(
    "dtype, width, classes, rows",
    [("float32", 65, 17, 64), ("float32", 64, 17, 0), ("float32", 512, 16, 0), ("float16", 512, 17, 0)],
)
def test_long_sums_of_float32_behind_a_hidden_layer_are_added_up_in_steps(dtype, width, classes, rows, tables):
    """By tiles, as those of a large last layer; of few classes all threads of a program add up."""
    shape = head_shape(samples=8, classes=classes)._replace(dtype=dtype)
    assert choose(shape, hidden=HiddenLayers(weight=torch.empty(width, 64))).last_rows == rows


def test_a_head_is_launched_as_the_table_says_alone_and_in_a_network(tables, device, monkeypatch):
    x, weight, bias = make_head((3, 12, 5, 4), 7, device=device)
    if not runs_triton(x):
        pytest.skip("needs the kernel")
    shape = HeadShape.of(head_view(x.shape, x.stride(), "avg", (1, 1)), 7, pool_max=False, dtype=x.dtype)
    tuned = dataclasses.replace(config_by_rule(shape), block_c=2, block_a=2, num_warps=1)
    assert tuned != config_by_rule(shape)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    write(tables, table(entry(shape, config=tuned), device=name), table_path(name).name)
    used, programs = [], LaunchConfig.programs
    monkeypatch.setattr(LaunchConfig, "programs", lambda *arguments: used.append(arguments[0]) or programs(*arguments))

    check_head(x, weight, bias)
    alone, expected = set(used), fused_head(x, weight, bias)
    used.clear()
    one = torch.ones(1, device=device)
    buffers = ExitBuffers.allocate(1, 3, 7, with_probs=True, device=device)
    ExitLaunch(buffers, 0, [ExitHead(weight, bias, one, one, "avg", (1, 1))])([x])
    assert alone == set(used) == {tuned}
    assert torch.equal(buffers.label[0], expected.label)


OTHER_KERNEL = table(entry(head_shape()), device="cpu", kernel="0" * 16).as_text()


def test_what_is_left_is_used_where_a_table_is_not(tables, monkeypatch):
    """Of its own and one that it borrows, whichever can be read and is of this kernel."""
    shape = head_shape()
    monkeypatch.setattr(tuned_table, "BORROWERS", {"cpu": DEVICE})
    (tables / FILE_NAME).write_text(table(entry(shape, config=other(shape))).as_text())
    for text in ("{", OTHER_KERNEL):
        (tables / "cpu.json").write_text(text)
        choosing.forget_tables()
        with pytest.warns(UserWarning, match=r"cpu\.json.*; launches go by what is left: a table that it borrows"):
            assert choose(shape) == other(shape)
    (tables / FILE_NAME).write_text("{")
    (tables / "cpu.json").write_text(table(entry(shape, config=other(shape)), device="cpu").as_text())
    choosing.forget_tables()
    with pytest.warns(UserWarning, match=FILE_NAME):
        assert choose(shape) == other(shape)


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "cpu.json: is not JSON"),
        (OTHER_KERNEL, "cpu.json, of cpu: tuned for another kernel, 0000000000000000; the one here is"),
        (OTHER_KERNEL, "run auxhead-tune everything there; launches go by what is left"),
    ],
    ids=["no JSON", "another kernel", "what to run"],
)
def test_a_table_that_is_not_used_is_warned_of_once_and_never_stops_a_forward(text, message, tables):
    (tables / "cpu.json").write_text(text)
    shapes = [head_shape(), head_shape(TAPS[1])]
    with pytest.warns(UserWarning, match=re.escape(message)) as warned:
        found = [choose(shape) for shape in shapes]
    assert found == [config_by_rule(shape) for shape in shapes]
    assert len(warned) == 1, "a single warning, whatever is asked for"
