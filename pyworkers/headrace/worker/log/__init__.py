"""What a worker tells of its legs: lines of its log, and spans."""
