"""Every public name of NeMo Automodel's map-style data modules is equal here, or differs by a documented decision.

`make parity` runs this in the environment that has NeMo Automodel; elsewhere it is skipped.
"""

import pytest

pytest.importorskip(
    "nemo_automodel", reason="NeMo Automodel is not installed here: `make parity` installs and compares it"
)

from tests.parity import names
from tests.parity.compare import Check, UnequalError, run_check, same

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs
CHECKS = names.load()
OUTCOMES = {key: None for key, check in CHECKS.items() if check.run is None}
INPUTS = {}


@pytest.mark.parametrize("module", names.MODULES)
def test_every_public_name_is_compared_or_listed_as_missing(module):
    assert sorted(names.public_names(module) - {name for where, name in CHECKS if where == module}) == []


@pytest.mark.parametrize("key", [key for key, check in CHECKS.items() if check.run is not None], ids=".".join)
def test_name(key):
    OUTCOMES[key] = run_check(CHECKS[key])


def test_the_page_says_what_was_found(request):
    if len(OUTCOMES) < len(CHECKS):
        pytest.skip("not every name was compared in this run")
    text = names.page(OUTCOMES)
    assert names.PAGE.read_text(encoding="utf-8") == text, "docs/parity.md is old: python -m tests.parity --write"


def test_differences_without_a_decision_fail():
    def differs(draw):
        yield "key", {"a": 1, "b": [1, 2]}, {"a": 1, "b": [1, 3]}

    check = Check("datum", "Datum", "nowhere", {}, None, 1, differs)
    with pytest.raises(UnequalError, match=r"datum.Datum differs at key.b.1: 2 against 3"):
        run_check(check)
    run_check(Check("datum", "Datum", "nowhere", {"key.b.*": "why"}, None, 1, differs))
    with pytest.raises(UnequalError, match="no input shows the documented difference"):
        run_check(Check("datum", "Datum", "nowhere", {"key.b.*": "why", "key.a": "why"}, None, 1, differs))


def test_errors_of_one_side_and_other_signatures_are_differences():
    def fails(draw):
        yield "", lambda: [][0], lambda: 1

    with pytest.raises(UnequalError, match="IndexError"):
        run_check(Check("datum", "Datum", "nowhere", {}, None, 1, fails))

    def collate_datums(datums, *, packed=True):
        return datums, packed

    with pytest.raises(UnequalError, match="packed=True against False"):
        run_check(Check("datum", "collate_datums", "nowhere", {}, collate_datums, 1, fails))
    assert callable(same)
