"""Frames between workers and routers, and the connections that carry them.

`frames.py` has the messages, `schema.py` and `codec.py` turn them into bytes, `connection.py` and `link.py` carry them,
`links.py` with `discovery.py` finds the routers.
"""
