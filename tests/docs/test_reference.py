"""What pages say of the code is what the code says: reasons, figures, metrics, formats, names."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import TYPE_CHECKING

import pytest

from docs.scripts import code, generated
from docs.scripts.links import absolute_readme, project_url
from tests.docs.blocks import ROOT, blocks_of, pages
from tests.docs.world import turns

if TYPE_CHECKING:
    from pathlib import Path

DOCS = ROOT / "docs"
TABLE = re.findall(
    r"^\| .+? \| `(\{.+?\})`.* \| `([^`]+)` \|$", (DOCS / "formats.md").read_text(encoding="utf-8"), re.MULTILINE
)


def codes(text: str) -> set[str]:
    return set(re.findall(r"`([a-z][a-z0-9_]+)`", text))


def test_every_reason_of_the_code_is_explained() -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8").partition("## Reasons")[2]
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| `")]
    explained = set().union(*(codes(cells[1] if len(cells) == 3 else cells[0]) for cells in rows))
    known = set(code.reasons())
    assert known - explained == set(), "reasons without an explanation in docs/troubleshooting.md"
    assert explained - known == set(), "docs/troubleshooting.md explains what the code does not say"


def test_reasons_are_found_in_every_way_the_code_gives_them() -> None:
    found = code.reasons()
    assert {"bad_image", "surplus_media", "too_long", "not_collated", "unlisted_shard", "killed_worker"} <= set(found)
    assert "sources/example_media.py" in found["surplus_media"]


def test_reasons_that_tests_expect_are_found() -> None:
    """A second way to find them: what tests compare ledgers with."""
    stages = "|".join(code.STAGES)
    expected = set()
    for path in (ROOT / "tests").rglob("*.py"):
        expected |= set(re.findall(rf'"(?:{stages}): ([a-z_0-9]+)"', path.read_text(encoding="utf-8")))
    assert len(expected) > 10
    assert expected - set(code.reasons()) == set()


PUT_TOGETHER = {
    ("build/builder.py", "_sample"),  # what the watcher of workers says of a sample that ended one
    ("convert/tar_samples.py", "iter_samples"),  # faults of tars, in convert/tar.py
    ("convert/tar.py", "iter_members"),
    ("errors.py", "bare"),  # an error once more
    ("schema.py", "_convert"),  # what a class said of its own fields
}
"""Where errors are made whose sentence the page does not have: it stands elsewhere."""


def test_the_sentence_of_every_error_that_is_made_is_on_the_page() -> None:
    found = code.messages()
    assert {(each.file, each.function) for each in found if not each.text} == PUT_TOGETHER
    page = (DOCS / "messages.md").read_text(encoding="utf-8")
    assert sum(page.count(f"\n## {kind}\n") for kind in {each.kind for each in found}) == len({e.kind for e in found})
    assert page.count("\n- ") == len({(each.kind, each.text, each.file) for each in found if each.text}) > 550


@pytest.mark.parametrize(
    ("file", "part"),
    [
        ("view/steps.py", "there is no step {number} in this plan"),
        ("sources/local_file.py", "cannot be opened ({error.strerror or error})"),
        ("state.py", "the state is damaged ({what}), so its place"),
        ("sources/forms.py", "which is no known form, so nothing can be learned"),
        ("errors.py", "needs the package '{package}', which is not installed"),
        ("convert/foreign.py", "the sample cannot be indexed ({error})."),
    ],
)
def test_sentences_are_followed_to_where_they_are_written(file: str, part: str) -> None:
    assert any(each.file == file and part in each.text for each in code.messages() if each.text)


def test_every_metric_is_explained(toy_shards: Path, processor: object) -> None:
    from vlm_stream import StreamLoader

    loader = StreamLoader(toy_shards, processor=processor, pack_size=2048)
    next(iter(loader))
    page = (DOCS / "observability.md").read_text(encoding="utf-8")
    assert set(loader.metrics()) - codes(page) == set()


def test_every_figure_of_the_report_is_explained(toy_shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from vlm_stream.cli import main
    from vlm_stream.plan import PlanReport

    page = (DOCS / "planning.md").read_text(encoding="utf-8")
    assert main(["plan", str(toy_shards), "--pack-size", "2048", "--world", "2"]) == 0
    lines = [line.split("│")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert len(lines) > 12
    for line in lines:
        name = line.partition(", step")[0]
        assert name.startswith("from ") or f"`{name}`" in page, line
    shown = re.findall(r"^ ?(\d*) +(\S.*?) +│", page.partition("```text")[2].partition("```")[0], re.MULTILINE)
    assert [name for _, name in shown] == lines
    numbers = [number for number, _ in shown if number]
    assert numbers == [str(place) for place in range(1, len(numbers) + 1)]
    table = re.findall(r"^\| ([\d, ]+) \| (.+?) \|", page, re.MULTILINE)
    assert ", ".join(number for number, _ in table) == ", ".join(numbers)
    named = dict(shown)
    for own, cell in table:
        for number, name in zip(own.split(", "), re.findall(r"`(.+?)`", cell), strict=True):
            assert named[number].startswith(name.removesuffix("ENTRY")), number
    words = page.lower()
    unsaid = {"packs", "packs_lower_bound", "complete", "state_bytes", "samples_by_source", "tokens_by_source"}
    for field in dataclasses.fields(PlanReport):
        plain = field.name.replace("_", " ")
        known = field.name in words or plain in words or "imbalance" in field.name or field.name in unsaid
        assert known or field.name in ("requests_per_step", "bytes_per_sample"), field.name


@pytest.mark.parametrize(("record", "line"), TABLE)
def test_every_form_is_recognised_as_the_page_says(record: str, line: str) -> None:
    from vlm_stream.sources import recognise

    record = record.replace("\\n", "\\\\n") if "\n" in record else record
    whole = record.replace('"conversations": [...]', f'"conversations": {json.dumps(turns("What?"))}')
    whole = whole.replace('"images": [...]', '"images": ["1.jpg"]').replace(", ...]", "]")
    found = recognise([json.loads(whole)])
    assert found is not None
    assert found.line == line


def test_the_table_of_forms_is_read() -> None:
    assert len(TABLE) == 12


def test_the_index_has_the_columns_that_the_specification_names() -> None:
    from vlm_stream.format import index_schema

    page = (DOCS / "shards.md").read_text(encoding="utf-8")
    table = page.partition("## The index")[2].partition("## The manifest")[0]
    named = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert named == index_schema().names


def test_the_manifest_has_the_fields_that_the_specification_names(toy_shards: Path) -> None:
    manifest = json.loads((toy_shards / "dataset.json").read_text(encoding="utf-8"))
    table = (DOCS / "shards.md").read_text(encoding="utf-8").partition("## The manifest")[2].partition("## Writing")[0]
    fields = [name for row in re.findall(r"^\| (`.+?`) \|", table, re.MULTILINE) for name in codes(row)]
    assert set(fields) == set(manifest)
    assert set(manifest["shards"]) <= codes(table)
    assert f"Format version {manifest['version']}." in (DOCS / "shards.md").read_text(encoding="utf-8")


def test_the_families_that_are_counted_by_rule_are_listed() -> None:
    from vlm_stream.tokens import families

    page = (DOCS / "families.md").read_text(encoding="utf-8")
    row = re.search(r"^\| by rule \| (.+) \|$", page, re.MULTILINE)
    assert row is not None
    assert codes(row[1]) == {family.name for family in families._FAMILIES.values()}


def test_every_public_door_is_on_the_page_of_the_api() -> None:
    listed = re.findall(r"^\| .+\]\(api/([\w.]+)\.md\)", generated.doors(), re.MULTILINE)
    assert sorted(listed) == sorted(generated.PUBLIC)
    assert [f"api/{module}.md" for module in listed] == list(generated.api_pages())
    package = ROOT / "vlm_stream" / "integrations"
    plugs = {f"vlm_stream.integrations.{path.stem}" for path in package.glob("*.py")}
    assert plugs - set(listed) == {"vlm_stream.integrations.__init__", "vlm_stream.integrations.trainer_checks"}


def test_the_readme_of_the_package_has_absolute_links_only() -> None:
    targets = re.findall(r"\]\(([^)]+)\)", re.sub(r"```.*?```", "", absolute_readme(), flags=re.DOTALL))
    assert len(targets) > 20
    assert [to for to in targets if not to.startswith(project_url())] == []


def test_the_address_of_the_project_stands_in_one_file() -> None:
    address = project_url().partition("://")[2]
    files = [*ROOT.glob("*.*"), *DOCS.rglob("*.*"), *(ROOT / "vlm_stream").rglob("*.py"), *ROOT.glob("configs/*")]
    found = {path.name for path in files if path.is_file() and address.encode() in path.read_bytes()}
    assert found == {"pyproject.toml"}


def test_the_page_of_the_api_leads_to_the_site() -> None:
    """Its text is nowhere else, so this page of the repository names an address."""
    site = project_url(name="Documentation")
    assert f"]({site}/api.html)" in (DOCS / "api.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", generated.KEPT)
def test_what_pages_keep_of_the_code_is_what_the_code_says(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    renewed = generated.renew(text)
    assert text == renewed, f"write docs/{page} anew: python -m docs.scripts.generated"
    assert len(generated.fill(text)) > 5000


def test_every_page_but_that_of_the_api_can_be_read_in_the_repository() -> None:
    for path in DOCS.rglob("*.md"):
        marked = "<!-- generated:" in path.read_text(encoding="utf-8")
        assert marked == (path.name in (*generated.KEPT, "api.md")), path


def test_links_of_the_readme_lead_somewhere() -> None:
    text = re.sub(r"```.*?```", "", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    for to in re.findall(r"\]\(([^)#]+)", text):
        assert (ROOT / to).exists(), to


def test_pages_and_examples_import_public_names_only() -> None:
    """The demo shows stages one by one, with parts that users reach by commands."""
    own = ["examples/demo.py"]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in ROOT.glob("examples/*.py")}
    texts |= {block.where: block.text for page in pages() for block in blocks_of(page) if block.language == "python"}
    imports = re.compile(r"^\s*(?:from|import) (vlm_stream[\w.]*)", re.MULTILINE)
    found = {where: imports.findall(text) for where, text in texts.items()}
    assert sum(map(len, found.values())) > 30
    for where, modules in found.items():
        assert where in own or set(modules) <= set(generated.PUBLIC), where
