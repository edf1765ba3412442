import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from penstock.cli.serve import durations
from penstock.cli.serve.display import Display, Live, Plain, display_for


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_plain_display_prints_each_change_with_its_second():
    out, clock = io.StringIO(), Clock()
    display = Plain(out, begin=100.0, clock=clock)
    display.enter("Ray", "starting")
    clock.now = 102.5
    display.end("Ray")
    assert out.getvalue().splitlines() == [
        "   0.0 s  Ray: starting",
        "   2.5 s  Ray: ready after 2.5 s",
    ]


def test_plain_display_uses_the_time_at_which_a_step_happened():
    out = io.StringIO()
    display = Plain(out, begin=100.0, clock=Clock())
    display.enter("demo", "import", at=103.0)
    display.enter("demo", "load", at=107.0)
    display.end("demo", at=108.0, failed=True)
    assert out.getvalue().splitlines()[-1] == "   8.0 s  demo: failed after 5.0 s (import 4.0, load 1.0)"


def test_part_that_starts_again_counts_anew():
    display = Display(io.StringIO(), begin=0.0)
    display.enter("demo", "import", at=1.0)
    display.end("demo", at=2.0)
    row = display.enter("demo", "import", at=10.0)
    assert row.ended is None
    assert row.seconds(now=11.0) == 1.0


def test_how_far_a_phase_is_begins_no_new_one():
    display = Display(io.StringIO(), begin=0.0)
    display.enter("demo", "download", at=1.0)
    display.enter("demo", "download (1.0 of 3.0 GB)", at=5.0)
    row = display.enter("demo", "import", at=9.0)
    assert row.spans(10.0) == [("download (1.0 of 3.0 GB)", 8.0), ("import", 1.0)]


def test_spans_of_a_running_part_add_up_to_its_seconds():
    display = Display(io.StringIO(), begin=0.0)
    display.enter("demo", "import", at=1.0)
    row = display.enter("demo", "load", at=5.0)
    assert row.spans(now=7.5) == [("import", 4.0), ("load", 2.5)]


def test_output_that_is_no_terminal_gets_plain_lines():
    assert display_for(io.StringIO()) is Plain


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_gets_a_table_with_every_part(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    out, clock = Terminal(), Clock()
    display = display_for(out)(out, begin=100.0, clock=clock)
    assert isinstance(display, Live)
    display.enter("Ray", "starting")
    clock.now = 102.0
    display.end("Ray")
    display.enter("demo", "load")
    display.close()
    text = Console(force_terminal=False).render_str(out.getvalue()).plain
    assert "✓" in text
    assert "2.0 s" in text
    assert "load 0 s" in text


@pytest.mark.parametrize("quiet", [False, True])
def test_without_a_change_lines_say_what_goes_on_and_how_long_it_took_the_last_time(quiet: bool):
    out, clock = io.StringIO(), Clock()
    last = {"demo": {"load": 8.4, "download": 30.0}}
    display = display_for(out, quiet=quiet)(out, begin=100.0, clock=clock, last=last)
    display.enter("demo", "load")
    display.enter("demo (2)", "download (1 of 3 GB)")
    display.enter("other", "import")
    clock.now = 105.0
    out.truncate(0)
    display.remind()
    going = "demo: load 5 of about 8 s; demo (2): download (1 of 3 GB) 5 of about 30 s; other: import 5 s"
    assert out.getvalue().strip("\0") == ("" if quiet else f"   5.0 s  {going}\n")


def test_durations_of_a_start_are_there_for_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    assert durations.last() == {}
    display = Display(io.StringIO(), begin=0.0)
    display.enter("demo", "download (1.0 of 3.0 GB)", at=1.0)
    display.enter("demo", "load", at=5.0)
    display.end("demo", at=7.0)
    display.enter("other", "load", at=5.0)
    durations.remember({"demo": {"old": 1.0}, "kept": {"load": 1.0}})
    durations.remember(display.durations())
    assert durations.last() == {"kept": {"load": 1.0}, "demo": {"download": 4.0, "load": 2.0}}
    (tmp_path / "cache" / "starts.json").write_text("{")
    assert durations.last() == {}


def test_said_text_is_not_taken_for_markup():
    out = io.StringIO()
    Plain(out, begin=0.0).say("[bold] and [1]")
    assert out.getvalue() == "[bold] and [1]\n"


def test_json_has_an_object_for_each_change_and_each_text():
    out = io.StringIO()
    display = display_for(out, as_json=True)(out, 0.0, clock=lambda: 2.0)
    display.enter("Ray", "starting", 0.5)
    display.end("Ray", 1.75)
    display.say("\nA note.\nOf two lines.")
    display.enter("Serve", "starting")
    display.close(failed=True)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [line["message"] for line in lines] == [
        "Ray: starting",
        "Ray: ready",
        "A note.\nOf two lines.",
        "Serve: starting",
        "Serve: failed",
    ]
    assert lines[1]["seconds"] == 1.2
    assert {line["level"] for line in lines} == {"INFO"}
