"""The command ``auxhead``: registers its subcommands, and hands them what other packages measure and draw."""

from collections.abc import Mapping

from .commands.calibrate import calibrate_command
from .commands.demo import BeyondDemo, demo_command
from .commands.errors import command_group
from .commands.export import export
from .commands.infer import infer
from .commands.options import Draw, SaveFigure
from .commands.train import train


def _beyond_demo() -> BeyondDemo:
    """Import what ``demo`` needs of packages that model may not import; help does without."""
    from ..autotune.bench.demo_latency import demo_latency
    from ..plots.figures.registry import FIGURES
    from ..plots.style import save_figure

    return BeyondDemo(demo_latency, FIGURES["exits"].draw, save_figure)


def _calibration_figures() -> tuple[Mapping[str, Draw], SaveFigure]:
    """Import what draws and saves the figures of ``calibrate``; help does without."""
    from ..plots.figures.registry import FIGURES
    from ..plots.style import save_figure

    return {name: FIGURES[name].draw for name in ("calibration", "anytime")}, save_figure


app = command_group("Early-exit heads that cost next to nothing on a GPU.")

app.command()(demo_command(_beyond_demo))
app.command()(train)
app.command()(calibrate_command(_calibration_figures))
app.command()(infer)
app.command()(export)


if __name__ == "__main__":
    app()
