"""The addition of a residual and the RMSNorm of the sum, with the graph's own roundings as attributes."""
