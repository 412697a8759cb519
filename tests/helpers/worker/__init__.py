"""Frames, and workers and routers that speak them over real sockets as a test says."""
