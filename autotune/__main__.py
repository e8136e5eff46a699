"""The command ``auxhead-tune``: registers its subcommands, and hands ``table`` the makers of tables."""

from collections.abc import Sequence

from ..model.commands.errors import command_group
from .bench.command import bench
from .bench.tables import bench_tables, pipeline_tables
from .doctor.command import DoctorCommand, doctor
from .doctor.tables import doctor_tables
from .everything.command import everything
from .heads.command import heads
from .heads.tables import head_tables, random_head_tables
from .overlap.command import overlap
from .overlap.tables import footprint_tables, overlap_tables
from .plan.command import plan
from .profile.command import profile
from .records.heads import RANDOM
from .records.record import Record
from .records.tables import RecordTable, table_command
from .sweep.command import sweep
from .tuned.command import explain, promote
from .zoo.command import zoo
from .zoo.tables import zoo_tables


def _sweep_tables(records: Sequence[Record]) -> list[RecordTable]:
    from .sweep.winners import sweep_tables  # configurations are named, for which PyTorch is imported

    return sweep_tables(records)


app = command_group("Benchmarks and tuning on your GPU, kept as records.")

for command in (sweep, bench, zoo, heads, overlap, profile):
    app.command()(command)
tables = {"bench": bench_tables, "heads": head_tables, RANDOM: random_head_tables, "overlap": overlap_tables}
tables |= {"footprint": footprint_tables, "pipeline": pipeline_tables, "doctor": doctor_tables, "zoo": zoo_tables}
app.command()(table_command(**tables, sweep=_sweep_tables))
app.command(cls=DoctorCommand, context_settings={"allow_interspersed_args": False})(doctor)
app.command()(everything)
app.command()(plan)
app.command()(promote)
app.command()(explain)


if __name__ == "__main__":
    app()
