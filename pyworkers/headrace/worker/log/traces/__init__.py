"""Spans of a worker's legs (`--otlp-endpoint`), under the spans that the router has of them."""
