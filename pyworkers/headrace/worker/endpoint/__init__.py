"""The small HTTP endpoint of a worker (`--http-port`): whether it lives, its metrics, its stacks, a profile."""
