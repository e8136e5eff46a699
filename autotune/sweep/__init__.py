"""``auxhead-tune sweep``: searches launch configurations of heads, each alone.

In: a network, or the ``broad`` set of heads. Out: a record of every configuration measured, and tables of the winners.

One head's way: ``run`` builds a network, or heads, and a measurer; ``measure`` asks a strategy of ``search`` what of
the ``space`` to time, and keeps it in ``records``; ``winners`` decides and shows. ``measure_winners_at_neighbours``
then measures each winner at the next batch sizes.
"""
