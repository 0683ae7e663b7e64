"""Fills a cache before the first host starts: models of a manifest, traced on fake tensors. Loads nothing."""
