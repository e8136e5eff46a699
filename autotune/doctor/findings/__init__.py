"""Findings of the doctor: a module for each group that has something in common; ``find_all`` has them all."""
