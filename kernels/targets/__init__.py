"""GPUs to compile for: what they are, and how to compile for one that is not here. Importing it imports no
torch."""
