"""Every producer (norm, add + norm, gated activation) with the quantisation of its result in one operator."""
