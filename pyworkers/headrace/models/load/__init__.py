"""From the name of a model to its weights: where they come from, how they are read, what must fit."""
