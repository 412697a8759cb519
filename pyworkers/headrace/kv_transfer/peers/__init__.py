"""Both ends of a connection between KV pools: `server.py` at the source, `client.py` at the puller."""
