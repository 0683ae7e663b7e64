"""One folder per operator (reference, Triton kernel, torch.library op), what targets are, and how torch's
symbolic sizes are written.

Imports torch and triton.
"""
