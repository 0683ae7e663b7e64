"""Quantisation with scales computed from the values: per tensor, per token or per group; FP8 and INT8."""
