"""``auxhead-tune sweep``: searches launch configurations of a network's heads, alone and in the captured network.

In: a network, or records to search in. Out: a record of every configuration measured, and tables of the winners.
"""
