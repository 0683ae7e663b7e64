"""Gated activations: SiLU or GELU of one half times the other, with the graph's roundings as attributes."""
