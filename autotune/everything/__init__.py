"""``auxhead-tune everything``: what the table and the pages of a GPU need, measured by one command.

In: nothing. Out: records, the GPU's tuned table, and files to commit.
"""
