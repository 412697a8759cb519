"""What `headrace serve` needs beside its main path."""
