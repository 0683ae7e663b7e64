"""Graph passes: one fusion per file; manager, verifier, fingerprints, reports."""
