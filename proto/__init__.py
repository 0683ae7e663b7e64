"""What client and daemon must agree on: messages, graph codec, artifact container, digests, limits. Never imports torch."""
