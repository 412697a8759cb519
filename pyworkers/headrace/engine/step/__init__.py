"""One step: its plan becomes arrays, the arrays go through the model, the results come back."""
