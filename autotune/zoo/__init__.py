"""``auxhead-tune zoo``: what ``make_runner`` chooses without being asked, on twelve networks, against torch.compile.

In: names of networks, or a factory of one's own. Out: records of kind "zoo", and a table.
"""
