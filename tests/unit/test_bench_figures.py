"""Published figures: each is made from records, and one command measures them all."""

from __future__ import annotations

import gzip
import json
import sys

import figures
import published_tables
import pytest
import records
from places import ROOT
from stats import paired_ratio

PAGES = {page: (ROOT / page).read_text() for page in published_tables.PAGES}
README = PAGES["README.md"]
RESULTS = ROOT / "bench" / "results" / "cpu"


@pytest.mark.parametrize("page", PAGES)
def test_the_pages_say_what_was_measured(page):
    assert published_tables.rewrite(PAGES[page], RESULTS) == PAGES[page]


def median_ratio(name, arm):
    found = records.read([RESULTS / f"{name}.jsonl.gz"])
    rounds = [r for r in found if r["record"] == "round"]
    mine, base = (
        {r["round"]: r["request_throughput"] for r in rounds if r["arm"] == a} for a in (arm, "stock")
    )
    return paired_ratio(mine, base).value


def test_the_first_screen_says_what_was_measured():
    (demo,) = records.read([RESULTS / "demo.json.gz"])
    summary = demo["summary"]
    assert f"**{summary['ttft_ratio_median']:.1f} times** sooner" in README
    for policy in ("seam", "query"):
        assert f"**{median_ratio('serving', policy):.2f} [" in README
    first = " s against ".join(
        f"{summary[f'ttft_{side}_first_sight_ms'] / 1000:.1f}" for side in ("ours", "stock")
    )
    assert f"{first} s of stock" in " ".join((ROOT / "docs" / "choosing.md").read_text().split())


def test_a_figure_changed_by_hand_is_noticed():
    page = PAGES["docs/results.md"]
    row = page.split("<!-- table: quality -->")[1].splitlines()[3]
    forged = page.replace(row, row.replace("[", "[9"))
    assert forged != page
    assert published_tables.rewrite(forged, RESULTS) == page


def shown_tables():
    return [name for page in PAGES.values() for _, name, _ in published_tables.MARKED.findall(page)]


def test_what_was_published_is_shown():
    published = {
        name
        for name, (*sources, _) in published_tables.TABLES.items()
        if all((RESULTS / source).is_file() for source in sources)
    }
    assert published == set(shown_tables())
    assert published >= {"quality", "serving", "soak", "plans"}


@pytest.mark.parametrize("name", shown_tables())
def test_every_shown_table_says_where_it_was_measured(name):
    *sources, _ = published_tables.TABLES[name]
    for source in sources:
        (run, *_) = records.read([RESULTS / source])
        environment = run["environment"]
        assert all((environment["commit"], environment["packages"]["sglang"], environment["hardware"]["cpu"]))


def test_every_table_has_a_stage_that_measures_it():
    stages = {stage.name for stage in figures.STAGES}
    made_of = {source.split(".")[0] for *sources, _ in published_tables.TABLES.values() for source in sources}
    assert made_of <= stages


def test_an_unknown_table_is_an_error():
    with pytest.raises(ValueError, match="table 'nonsense' is none of"):
        published_tables.rewrite("<!-- table: nonsense -->\n<!-- end -->", RESULTS)


def test_published_records_hold_no_path_of_a_machine(tmp_path):
    record = {"options": {"out": "/home/somebody/results", "model": "/data/models/Small"}, "text": "/ by 2"}
    figures.write_result(json.dumps(record), tmp_path / "one.jsonl.gz")
    (clean,) = records.read([tmp_path / "one.jsonl.gz"])
    assert clean == {"options": {"out": "results", "model": "Small"}, "text": "/ by 2"}
    for path in RESULTS.glob("*.gz"):
        assert b'"/' not in gzip.decompress(path.read_bytes()), path


def stage(code: str) -> figures.Stage:
    return figures.Stage("one", ("-c", code), "result.json")


@pytest.fixture
def python_as_front_door(monkeypatch):
    monkeypatch.setattr(figures, "FRONT_DOOR", (sys.executable,))


WRITES = "import pathlib, sys; pathlib.Path(r'{out}', 'result.json').write_text('[]'); sys.exit(%d)"


@pytest.mark.parametrize(
    ("code", "status", "is_finished"),
    [
        (WRITES % 0, 0, True),
        (WRITES % 1, 1, True),  # a red gate is a result
        (WRITES % 130, 130, False),  # stopped by hand: half a result
        ("import sys; sys.exit(0)", 2, False),  # left nothing
    ],
)
def test_a_stage_is_finished_only_with_a_result(python_as_front_door, tmp_path, code, status, is_finished):
    folder = tmp_path / "one"
    assert figures.run_stage(stage(code), folder, quick=False) == status
    assert figures.finished(folder) is is_finished


def test_what_is_finished_is_not_measured_again(python_as_front_door, tmp_path, monkeypatch, capsys):
    count = "import pathlib; p = pathlib.Path(r'{out}', 'result.json'); p.open('a').write('1')"
    monkeypatch.setattr(figures, "STAGES", (stage(count),))
    words = ["--out", str(tmp_path)]
    for extra, runs in (([], "1"), ([], "1"), (["--again"], "11")):
        assert figures.main([*words, *extra]) == 0
        assert (tmp_path / "one" / "result.json").read_text() == runs
    assert "measured already" in capsys.readouterr().err


def test_a_quick_run_is_not_published(tmp_path):
    folder = tmp_path / "demo"
    folder.mkdir()
    (folder / "finished").write_text("exit status 0, quick\n")
    with pytest.raises(ValueError, match="measure it in full"):
        figures.publish([figures.STAGES[0]], tmp_path)


def test_server_flags_stay_behind_their_dashes(tmp_path):
    quality = next(stage for stage in figures.STAGES if stage.name == "quality")
    command = quality.command(tmp_path, quick=True)
    assert command.index("--quick") < command.index("--")


@pytest.mark.parametrize(
    ("commit", "shown"),
    [
        ("0123456789abcdef", "commit 012345678;"),
        ("0123456789abcdef with local changes", "commit 012345678 with local changes;"),
        (None, "commit unknown;"),
    ],
)
def test_a_changed_tree_is_named(commit, shown):
    (run, *_) = records.read([RESULTS / "soak.jsonl.gz"])
    run["environment"]["commit"] = commit
    assert shown in published_tables.where(run)
