"""Writes records to a file as the commands do."""

from auxhead.autotune.records.record import append_record


def written(path, *records):
    """Returns the path."""
    for one in records:
        append_record(path, one)
    return path
