"""RMSNorm over the last dimension, with the graph's own roundings as attributes."""
