"""Options of the command ``auxhead-tune bench``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ...model.basics.bad_input import BadInput
from ...model.commands.errors import one_line_errors
from ..measuring.cells import RUNNERS, STAGES, TRUNKS, Dtype, Placement
from ..measuring.failures import resumable
from ..measuring.options import MODEL_HELP, HeadKinds, check_model, check_own, is_factory, out_option
from ..records.record import BadRecord, check_out

#: Timed rounds of each variant, unless asked otherwise: ten of each fresh capture.
ROUNDS = 50
#: Rounds of ``--quick``.
QUICK_ROUNDS = 20
#: Variants of ``--quick``, which are built in seconds.
QUICK_VARIANTS = (
    "eager*",
    "graph-*@as_is",
    "graph-*@cudnn",
    *(f"{runner}@{trunk}" for runner in RUNNERS for trunk in TRUNKS),
)
#: Exit patterns of ``--quick``.
QUICK_EXITS = ("never", "layer1")
#: Of pipelines over several GPUs: images a request, those of a micro-batch, and rounds, three of each fresh capture.
BATCHES, SPLIT_SIZES, PIPELINE_ROUNDS = (120, 512), (20, 40, 64), 15


def bench(
    model: Annotated[list[str] | None, typer.Option(help=MODEL_HELP, show_default=False)] = None,
    dtype: Annotated[list[Dtype] | None, typer.Option(help="Of weights and inputs.", show_default=False)] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Images a call.", show_default=False)] = None,
    classes: Annotated[list[int] | None, typer.Option(min=1, help="Of every exit.", show_default=False)] = None,
    placement: Annotated[
        list[Placement] | None,
        typer.Option(help="A head after every block, every stage, or every stage but the last.", show_default=False),
    ] = None,
    heads: HeadKinds = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(help="Names or globs, such as 'polled@*'; baselines come along.", show_default=False),
    ] = None,
    exits: Annotated[
        list[str] | None,
        typer.Option(help="Where samples leave, names or globs: never, a tap, own, 40/30/20/10.", show_default=False),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two small cells, no torch.compile, few rounds.")] = False,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Timed rounds.", show_default=f"{ROUNDS}; with --quick {QUICK_ROUNDS}"),
    ] = None,
    out: Annotated[Path | None, out_option("bench")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what is already there.")] = False,
    devices: Annotated[int, typer.Option(min=1, help="GPUs; 2 measures pipelines of one network over both.")] = 1,
    split_size: Annotated[
        list[int] | None, typer.Option(min=1, help="Images of a pipeline's micro-batch.", show_default="20, 40, 64")
    ] = None,
) -> None:
    """Measure this project's runners against the bare network, naive heads, plain graphs and torch.compile.

    Every option that chooses may be given several times. A run that was stopped goes on where it was.

    With --devices 2, pipelines of a ResNet (one --model, --dtype and --classes) against one GPU, model-parallel and the
    pipeline of PyTorch's tutorial.
    """
    models: Sequence[str] = model or ()
    asked: dict[str, Sequence[Any]] = {
        "dtype": [one.value for one in dtype or ()],
        "batch": batch or (),
        "classes": classes or (),
        "placement": [one.value for one in placement or ()],
        "heads": [one.value for one in heads or ()],
    }
    with one_line_errors(BadRecord), resumable():
        for name in models:
            check_model("--model", name)
        if devices > 1:
            others = {"placement": placement, "heads": heads, "variant": variant, "exits": exits, "quick": quick}
            _bench_pipelines(models, asked, others, devices, split_size or SPLIT_SIZES, rounds, out, fresh)
            return
        if split_size:
            raise BadInput(f"--split-size: got {split_size[0]}, wants none but with --devices 2")
        if any(map(is_factory, models)):
            if quick:
                raise BadInput("--quick: chooses cells of the core matrix, wants no network of your own beside it")
            if len(models) > 1:
                raise BadInput(f"--model: got {len(models)} of them, wants a factory alone")
            check_own(models[0], **asked)
        check_out(out)
        from .run import run_bench

        run_bench(
            models,
            asked,
            quick=quick,
            variants=tuple(variant or (QUICK_VARIANTS if quick else ())),
            exits=tuple(exits or (QUICK_EXITS if quick else ())),
            rounds=rounds or (QUICK_ROUNDS if quick else ROUNDS),
            out=out,
            fresh=fresh,
        )


def _bench_pipelines(
    models: Sequence[str],
    asked: dict[str, Sequence[Any]],
    others: dict[str, Any],
    devices: int,
    split_sizes: Sequence[int],
    rounds: int | None,
    out: Path | None,
    fresh: bool,
) -> None:
    """Measure one network over several GPUs; refuses options of the other benchmark, and several networks."""
    for name, value in others.items():
        if value:
            raise BadInput(f"--{name}: is none of pipelines, wants no value beside --devices {devices}")
    if any(map(is_factory, models)):
        raise BadInput(f"--model: got {models[0]}, wants one of {', '.join(STAGES)} with --devices {devices}")
    chosen = {"model": models, "dtype": asked["dtype"], "classes": asked["classes"]}
    for name, values in chosen.items():
        if len(values) > 1:
            raise BadInput(f"--{name}: got {len(values)} values, wants one with --devices {devices}")
    batches = asked["batch"] or BATCHES
    if min(batches) <= min(split_sizes):
        raise BadInput(f"--split-size: got {min(split_sizes)}, wants less than the batch, {min(batches)}")
    check_out(out)
    from ..pipelines.run import run_pipelines

    run_pipelines(
        models[0] if models else "resnet50",
        devices=devices,
        dtype=asked["dtype"][0] if asked["dtype"] else "float16",
        classes=asked["classes"][0] if asked["classes"] else 1000,
        batches=batches,
        split_sizes=sorted(split_sizes),
        rounds=rounds or PIPELINE_ROUNDS,
        out=out,
        fresh=fresh,
    )
