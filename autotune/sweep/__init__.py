"""``auxhead-tune sweep``: searches launch configurations of a network's heads, alone and in the captured network.

In: a network. Out: a record of every configuration measured, and tables of the winners.

One head's way: ``run`` builds a network and its measurer; ``measure`` asks a strategy of ``search`` what of the
``space`` to time, and keeps it in ``records``; ``winners`` decides and shows. ``measure_winners_at_neighbours`` then
measures each winner at the next batch sizes.
"""
