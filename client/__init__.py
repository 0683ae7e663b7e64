"""The inference host's side: Dynamo backend, graph codec, transport, loader, local fallback, CLI."""
