"""A mixture of experts: route, permute, multiply, combine."""
