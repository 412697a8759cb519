"""A fleet of real processes, faults by a seeded plan, and the proof that clients and pools notice nothing.

    make chaos SECONDS=600 SEED=1 OUT=chaos.json

Reading order: `load` (what is asked), `plan` (what goes wrong and when), `fleet` (router, workers), `worker`, `seams`
and `steps` (a real worker that can be told to die at a given step), `clients` and `crowd` (streams, compared), `faults`
(one fault from its trigger to the recovery), `hangups`, `network` (hosts as network namespaces), `suite` (rounds and
leak checks), `report`. Groups of ranks: `groups` (faults under a crowd), `ranks/` (fleets of mock ranks, and of real
ones that are forked and supervised), `inside/rank_steps` (the phases of a step in a real rank).
"""
