"""Runners: an ``EarlyExitNetwork`` made ready for some batch sizes, which turns x into an ``ExitResult``.

``runner`` is the base; ``eager`` runs without graphs and is what the others are tested against; ``overlapped``,
``polled``, ``gated`` and ``compacting`` replay CUDA graphs, by ``graph_runner`` and ``capture``, which they share.
"""
