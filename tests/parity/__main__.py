"""`python -m tests.parity [NAME ...]`: run the checks and print what came of them."""

import sys
import time

from tests.parity import names
from tests.parity.compare import CHECKS, UnequalError, run_check

names.load()
wanted = sys.argv[1:]
total = 0
for (module, name), check in CHECKS.items():
    if check.run is None or (wanted and not any(word in f"{module}.{name}" for word in wanted)):
        continue
    began = time.perf_counter()
    try:
        out = run_check(check)
        said = "differs" if out.shown else "equal"
        total += out.inputs
        said += f" {out.inputs} inputs {dict(out.shown) or ''}"
    except Exception as error:
        said = f"UNEQUAL {error}" if isinstance(error, UnequalError) else f"FAILED {error!r}"
    print(f"{time.perf_counter() - began:6.1f}s {module}.{name}: {said}", flush=True)
print(total, "inputs")
