"""The command ``auxhead``: registers its subcommands, and hands them what other packages measure and draw."""

import typer

from .commands.calibrate import BeyondCalibration, calibrate_command
from .commands.demo.command import BeyondModel, demo_command
from .commands.export import export
from .commands.group import Subcommands, version_option
from .commands.infer import infer
from .commands.train import train


def _beyond_model() -> BeyondModel:
    """Import what ``demo`` needs of packages that model may not import; help does without."""
    from ..autotune.bench.demo_latency import demo_latency
    from ..plots.figures.registry import FIGURES
    from ..plots.style import save_figure

    return BeyondModel(demo_latency, FIGURES["exits"].draw, save_figure)


def _beyond_calibration() -> BeyondCalibration:
    """Import what ``calibrate`` needs of packages and folders that calibration may not import."""
    from ..plots.figures.registry import FIGURES
    from ..plots.style import save_figure
    from .commands.infer_load import load_network

    return BeyondCalibration(load_network, FIGURES["calibration"].draw, save_figure)


app = typer.Typer(
    help="Early-exit heads that cost next to nothing on a GPU.",
    cls=Subcommands,
    callback=version_option,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.command()(demo_command(_beyond_model))
app.command()(train)
app.command()(calibrate_command(_beyond_calibration))
app.command()(infer)
app.command()(export)


if __name__ == "__main__":
    app()
