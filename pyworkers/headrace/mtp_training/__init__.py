"""Training of a multi-token-prediction head on text that the model writes itself; `headrace.train_mtp` runs it.

prompts -> corpus (the model answers them; tokens, hidden states and likely next tokens are kept) -> module and loop
-> head file, acceptance.
"""
