"""Settings, each of them written once: a row of a table is a flag, its check, its help, and the field it fills.

`values.py` reads one value. `table.py` makes a parser of rows, keeps what was typed, and hands it to another process.
`worker.py` is the table of a worker, `engine.py` its rows for the engine, and `fleet.py` the table of `headrace serve`.
The router's table is in Rust (`router/src/config/args.rs`); `router.py` shows it to `serve`. Nothing here imports
torch: `--help` answers at once.
"""
