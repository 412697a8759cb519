"""KV between workers, as the loop of one sees it: one `connector`, with a `producer` (prefill), a `consumer` (decode)
and the `migration` of hot blocks when a worker leaves.

Everything here runs on the event loop. The engine is touched in methods that say so, between two of its steps; what
happens while a step runs is noted, and the loop is woken. `peers` has both ends of the connections between pools,
`backends` what moves the bytes.
"""
