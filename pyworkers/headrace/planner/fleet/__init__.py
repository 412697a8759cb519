"""What serves some traffic: pools of groups, and how many of them it takes."""
