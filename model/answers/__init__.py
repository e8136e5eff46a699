"""Rules by which a head may answer, a network's answer sample by sample, and the watch over where samples leave."""
