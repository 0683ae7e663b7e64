"""Quantisation to FP8 with one scale per tensor, given as an input."""
