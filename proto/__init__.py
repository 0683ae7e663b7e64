"""What client and daemon must agree on: messages, graph codec, container, digests, limits. Never imports
torch."""
