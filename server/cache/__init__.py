"""Tiers of the store: small wrappers around one interface (tier.py)."""
