//! Chooses a worker for a request and books its load in the same step.
