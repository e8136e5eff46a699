"""Guides that run: what is asked most about heads beside a network on a GPU, with the code of every step."""
