"""RMSNorm and the quantisation of its result in one operator."""
