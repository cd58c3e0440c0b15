"""Commands: one module for each thing that `vlm-stream` does.

Enters: parsed arguments. Leaves: work done, text for people or JSON for programs, an exit code: 0 done, 1 done and
something is wrong with the data, 2 the input cannot be used. A command holds `EXAMPLES`, `add_arguments(parser)` and
`run(args)`; the work itself is done by the rooms below.

Shared: `arguments.py` (stores, options of a stream, saved states), `output.py` (tables, JSON, progress).
"""
