"""One folder per operator (reference, Triton kernel, torch.library op), and what targets are.

Imports torch and triton.
"""
