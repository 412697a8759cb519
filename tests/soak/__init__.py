"""A router under steady load with churn, and whether what it holds stays flat."""
