"""Benchmarks and tuning on a GPU: the command ``auxhead-tune``, a folder for each of its subcommands.

Every folder has the same files: ``command`` (options, and nothing that takes seconds to import), ``run`` (what the
command does with them), ``measure`` (what runs on the GPU), ``records`` (what is kept) and ``tables`` (what is
printed). Below them lie ``records``, the record format and who wins by it, without torch, and
``measuring``, the rig they share: networks, timers, checks of answers.
"""
