"""The processes that `headrace serve` starts."""
