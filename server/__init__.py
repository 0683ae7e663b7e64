"""The daemon. This process never imports torch; its workers do."""
