"""``auxhead-tune retune``: whether searches that know nothing of each other agree."""
