"""``auxhead-tune plan``: measures and prints the choice that ``exits="auto"`` makes.

In: a network. Out: tables of all candidates on this GPU, and on request what to take on several.

    run         makes the network, measures its runners, prints
    devices     what its segments take on this GPU, and so in parts on several
    advice      which way to take by that, in a table and in words
"""
