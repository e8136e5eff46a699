"""The record format, statistics and tables, and who wins by the records; no torch here.

In: JSON lines of measurements, those of an H200 in ``h200/``. Out: records, comparisons, decisions and tables, for the
commands of ``auxhead-tune`` and for the figures.
"""
