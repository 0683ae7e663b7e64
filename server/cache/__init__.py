"""Tiers of the store: small wrappers around one interface (`tier.py`), and the facade that the daemon asks
(`store.py`).

Read in this order: `tier.py` (the contract), `memory.py`, `disk.py`, the wrappers (`measured`, `verified`,
`bounded`, `layered`), `catalogue.py` (manifests and contents belong together), `store.py`. Nothing here knows
gRPC, keys or workers.
"""
