"""What runs outside the daemon process: fork server, compilation, graph validation."""
