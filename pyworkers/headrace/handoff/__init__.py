"""KV between workers, as the loop of one sees it: `exports`, `arrivals`, and the `handover` when one leaves.

Everything here runs on the event loop. The engine is touched in methods that say so, between two of its steps; what
happens while a step runs is noted, and the loop is woken.
"""
