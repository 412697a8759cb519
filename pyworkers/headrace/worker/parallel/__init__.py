"""Groups of worker processes that share the experts of one model: *ranks*, each with an engine and links of its own.

Reading order: `environment.py` (what torchrun says), `rendezvous.py` (the ranks find each other and compare what they
serve), `messages.py` and `control.py` (links to rank 0), `agreement.py` (rounds), `group.py` (what the engine sees);
then `rebalance.py` (experts that move) and `turns.py` (how ranks stay alike meanwhile).
"""
