"""Quantisation to NVFP4: groups of 16, a scale in e4m3 for each and one in float32 for the tensor."""
