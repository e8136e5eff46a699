"""The command ``auxhead``: registers its subcommands, and hands ``demo`` its GPU latencies and its figure."""

import typer

from ..autotune.bench.demo_latency import demo_latency
from ..plots.figures.exits import draw
from ..plots.files import save_figure
from .demo.command import demo_command, infer

app = typer.Typer(
    help="Early-exit heads that cost next to nothing on a GPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.command()(demo_command(demo_latency, draw, save_figure))
app.command()(infer)


if __name__ == "__main__":
    app()
