"""`python -m tests.parity [NAME ...]`: run the checks, say what came of each; `--write` writes docs/parity.md."""

import sys
import time

from tests.parity import names
from tests.parity.compare import UnequalError, run_check


def main(*words: str) -> int:
    wanted = [word for word in words if word != "--write"]
    outcomes, failed = {}, 0
    for key, check in names.load().items():
        if wanted and not any(word in ".".join(key) for word in wanted):
            continue
        if check.run is None:
            outcomes[key] = None
            continue
        began = time.perf_counter()
        try:
            outcomes[key] = out = run_check(check)
            text = f"{names.said(check, out)[0]} on {out.inputs} inputs {dict(out.shown) or ''}"
        except UnequalError as error:
            text, failed = f"UNEQUAL {error}", failed + 1
        sys.stdout.write(f"{time.perf_counter() - began:6.1f}s {'.'.join(key)}: {text}\n")
    inputs = sum(out.inputs for out in outcomes.values() if out is not None)
    sys.stdout.write(f"{len(outcomes)} names, {inputs} inputs, {failed} unequal\n")
    if "--write" in words and not failed and not wanted:
        names.PAGE.write_text(names.page(outcomes), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
