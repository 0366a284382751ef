"""Numbers to text."""

from __future__ import annotations

import json
from io import StringIO

import pytest
from rich.console import Console

from offload import units
from offload.metrics import DiskStats, ExpertStats, LevelStats, LinkStats, Stats, TableStats
from offload.plan.planner import Options
from test_cli_fake import make_plan, make_stats
from triforce_cli.ground import text as render
from triforce_cli.render.stats import stats_table
from triforce_cli.screen.progress import PlainDisplay, TerminalDisplay


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (24.2e9, "24.2 GB"), (3e12, "3.00 TB")],
)
def test_bytes_are_shown_in_units_of_ten(count, text):
    assert units.size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.00 s"),
        (0.054, "0.05 s"),
        (4.24, "4.2 s"),
        (9.96, "10 s"),
        (41.4, "41 s"),
        (59.7, "1 min 00 s"),
        (187, "3 min 07 s"),
        (3599.6, "1 h 00 min"),
        (3720, "1 h 02 min"),
    ],
)
def test_duration_never_shows_sixty_of_anything(seconds, text):
    assert render.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.314, "0.31"),
        (9.994, "9.99"),
        (9.996, "10.0"),
        (42.04, "42.0"),
        (99.96, "100"),
        (12345, "12,345"),
    ],
)
def test_rates_keep_three_digits(value, text):
    assert render.significant(value) == text


def test_percent_is_100_only_when_done():
    assert render.percent(999, 1000) == 99
    assert render.percent(1000, 1000) == 100
    assert render.percent(0, 0) == 100


def test_pace_says_rate_and_time_left_once_there_is_one():
    assert render.pace(0, 1000, "tokens", 0.0) == "of 1,000 tokens"
    assert render.pace(250, 1000, "tokens", 5.0) == "of 1,000 tokens, 50.0 tokens/s, 15 s left"
    assert render.pace(2**30, 2**31, "bytes", 2.0) == "of 2.15 GB, 537 MB/s, 2.0 s left"


def test_stats_table_says_what_each_level_did():
    lines = stats_table(make_stats(), make_plan(Options())).splitlines()
    rows = {line.split()[0]: line.split() for line in lines if line}
    assert rows["prompt"][1:] == ["40", "s", "32,768", "tokens", "790", "tokens/s"]
    assert rows["first"][2:4] == ["42", "s"]
    assert rows["decode"][1:] == ["8.0", "s", "200", "tokens", "24.9", "tokens/s,", "40.2", "ms/token"]
    assert rows["level"] == ["level", "passes", "rows", "seconds", "ms/pass", "drafted", "acceptance", "tokens/round"]
    assert rows["target"] == ["target", "20", "320", "2.00", "100", "200", "0.90", "10.0"]
    assert rows["retrieval"] == ["retrieval", "100", "300", "4.00", "40.0", "200", "0.50", "2.00"]
    assert rows["draft"] == ["draft", "200", "1,200", "1.00", "5.00", "0", "-", "-"]
    assert rows["link"] == ["link", "nothing", "moved"]
    assert rows["plan"] == ["plan", "draft", "->", "retrieval", "->", "target,", "and", "lookups"]
    assert lines[-3].strip() == "gamma up to 15, draft_gamma 2, budget 1,024, chunk 16"
    assert "offload none" in lines[-2]
    assert lines[-1] == "predicted   first token 40 s, 14.2 ms/token, plain 42.3, acceptance 0.90"


def test_stats_table_says_what_crossed_the_link():
    stats = make_stats()
    stats.prefill_link = LinkStats(bytes_to_device=3 * 2**30, bytes_to_host=2**30, bytes_per_second=1e9)
    stats.decode_link = LinkStats(bytes_to_device=2_000_000_000, busy_seconds=1.5, bytes_per_second=1e9)
    stats.decode_seconds = 2.0
    stats.levels[0].link_bytes = 1_900_000_000  # of the target, which ran for two seconds
    table = stats_table(stats, make_plan(Options(offload=frozenset({"weights", "kv"}))))
    assert "prefill 3.22 GB to device, 1.07 GB to host" in table
    assert "decode  2.00 GB to device, 0 B to host" in table
    assert "utilisation of full passes 0.95, idle for 0.25 of decode" in table
    assert "offload kv,weights" in table
    assert "12 bits" not in table
    stats.wider_layers = 2
    wider = "            2 layers cross in 12 bits, not fewer: weights would not come back"
    assert wider in stats_table(stats, make_plan(Options(offload=frozenset({"weights"})))).splitlines()


def test_unpaced_link_shows_bytes_without_a_utilisation():
    stats = make_stats()
    stats.decode_link = LinkStats(bytes_to_device=2**30)
    table = stats_table(stats, make_plan(Options()))
    assert "1.07 GB to device, 0 B to host" in table
    assert "utilisation of full passes -" in table


def test_the_stats_table_says_what_the_disk_gave():
    stats = make_stats()
    stats.decode_link = LinkStats(experts=ExpertStats(30, 10, 50_000_000), disk=DiskStats(10, 50_000_000, 0.25))
    lines = stats_table(stats, make_plan(Options())).splitlines()
    at = lines.index("experts     40 wanted in decode, 75 % in memory already, 50.0 MB fetched")
    assert lines[at - 1] == "link        nothing moved"
    assert lines[at + 1] == "            10 read from the file, 50.0 MB in 0.25 s"
    stats.decode_link.bytes_to_device = 90
    assert "75 % on the device already, 50.0 MB fetched" in stats_table(stats, make_plan(Options()))


def test_the_stats_table_says_which_rows_of_n_grams_were_in_memory() -> None:
    stats = make_stats()
    stats.decode_link = LinkStats(ngram_rows=TableStats(1200, 400)) - LinkStats(ngram_rows=TableStats(200))
    line = "n-grams     1,400 rows wanted in decode, 71 % in memory already"
    assert line not in stats_table(make_stats(), make_plan(Options()))
    assert line in stats_table(stats, make_plan(Options())).splitlines()


def test_the_stats_table_says_whose_drafts_were_kept_where_there_was_a_choice() -> None:
    level = LevelStats("target", passes=3, rows=20, seconds=1.0)
    level.count_round(["lookup", "lookup", "retrieval"], 1)
    level.count_round(["retrieval"], 1)
    lines = stats_table(Stats(levels=[level]), make_plan(Options())).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("target"))
    assert lines[at].split() == ["target", "3", "20", "1.00", "333", "4", "0.50", "2.00"]
    assert [line.split() for line in lines[at + 1 : at + 3]] == [["lookup", "2", "0.50"], ["retrieval", "2", "0.50"]]
    said = json.loads(json.dumps(level.as_dict()))  # a Counter was no JSON
    assert said["drafted_by"] == {"lookup": 2, "retrieval": 2}
    assert said["accepted_by"] == {"lookup": 1, "retrieval": 1}


def test_stats_table_fits_80_columns_with_large_numbers_and_no_numbers():
    large = make_stats(num_prompt_tokens=131_072, output_tokens=100_000)
    large.prefill_seconds = large.decode_seconds = 86_400.0
    large.prefill_link = large.decode_link = LinkStats(bytes_to_device=9 * 2**50, bytes_to_host=9 * 2**50)
    large.wider_layers = 999
    large.levels = [LevelStats("retrieval", 999_999, 999_999, 99_999.0, 999_999, 999_999, 999_999)]
    plan = make_plan(Options(budget=2**24, offload=frozenset({"weights", "kv"})))
    for stats in (large, Stats(levels=[LevelStats("target")])):
        assert max(map(len, stats_table(stats, plan).splitlines())) <= 80


def plain_lines(stage: str, unit: str, *updates: tuple[float, int, int]) -> list[str]:
    """The lines on a stage. updates: (time, done, total)."""
    lines: list[str] = []
    times = iter([at for at, _, _ in updates])
    display = PlainDisplay(lines.append, clock=lambda: next(times))
    for _, done, total in updates:
        display.update(stage, done, total, unit)
    return lines


def test_plain_progress_says_ever_more_seldom_how_far_it_is_and_the_end():
    """A line every five seconds, and two for each short stage, stood over an answer of nine words."""
    seconds = [0, *range(1, 200), 200, 201]
    assert plain_lines("prefill", "tokens", *((at, min(at, 200), 200) for at in seconds)) == [
        "prefill: 2% of 200 tokens, 1.00 tokens/s, 3 min 15 s left",
        "prefill: 5% of 200 tokens, 1.00 tokens/s, 3 min 10 s left",
        "prefill: 10% of 200 tokens, 1.00 tokens/s, 3 min 00 s left",
        "prefill: 20% of 200 tokens, 1.00 tokens/s, 2 min 40 s left",
        "prefill: 40% of 200 tokens, 1.00 tokens/s, 2 min 00 s left",
        "prefill: 70% of 200 tokens, 1.00 tokens/s, 1 min 00 s left",
        "prefill: 200 tokens in 3 min 20 s, 1.00 tokens/s",
    ]


def test_plain_progress_says_nothing_of_a_short_stage():
    assert plain_lines("load", "bytes", (0, 0, 100), (4, 50, 100), (4.9, 100, 100)) == []


def test_a_stage_that_begins_again_is_told_again():
    """Of a batch's prompts only the first one's prefill was shown."""
    once = [(0, 0, 100), (6, 100, 100)]
    again = [(at + 10, done, total) for at, done, total in once]
    assert plain_lines("prefill", "tokens", *once, *again) == ["prefill: 100 tokens in 6.0 s, 16.7 tokens/s"] * 2


def test_a_save_is_said_in_one_number():
    """It said 99.2 MB, the most that pages take, and then 78.0 MB."""
    lines = plain_lines("save", "bytes", (0, 0, 99_200_000), (5, 39_000_000, 78_000_000), (10, 78_000_000, 78_000_000))
    assert lines == ["save: 50% 7.80 MB/s, 5.0 s left", "save: 78.0 MB in 10 s, 7.80 MB/s"]


def test_a_bar_is_of_what_is_to_come_after_all():
    """Pages of a session that are packed are fewer bytes than was thought."""
    screen = StringIO()
    display = TerminalDisplay(Console(file=screen, force_terminal=True, width=80))
    display.update("save", 0, 1000, "bytes")
    display.update("save", 250, 500, "bytes")
    display.stop()
    shown = screen.getvalue()
    assert " 50% " in shown
    assert " 25% " not in shown


def test_a_spinner_is_drawn_before_anything_else_can_be_written():
    """Drawn later, by a thread, it stayed on the screen where a line was written at that moment."""
    screen = StringIO()
    display = TerminalDisplay(Console(file=screen, force_terminal=True, width=80))
    display.wait("500 tokens: [plain]")
    assert "500 tokens: [plain]" in screen.getvalue()
    display.stop()


def test_plain_progress_starts_anew_with_each_stage():
    lines: list[str] = []
    times = iter([0.0, 4.0, 4.0, 8.0, 9.0])
    display = PlainDisplay(lines.append, clock=lambda: next(times))
    for stage, done in (("load", 512), ("load", 1024), ("prefill", 0), ("prefill", 512), ("prefill", 1024)):
        display.update(stage, done, 1024, "bytes")
    assert lines == ["prefill: 1.02 kB in 5.0 s, 205 B/s"]


def test_plain_progress_reckons_with_what_was_done_since_it_began():
    """A fetch that goes on from half of a file said twice the speed."""
    assert plain_lines("restore", "tokens", (0, 5000, 10000), (10, 7500, 10000), (20, 10000, 10000)) == [
        "restore: 75% of 10,000 tokens, 250 tokens/s, 10 s left",
        "restore: 10,000 tokens in 20 s, 250 tokens/s",
    ]


def test_plain_progress_invents_no_time_for_what_was_done_before_anybody_looked():
    lines: list[str] = []
    display = PlainDisplay(lines.append, clock=lambda: 1.0)
    for _ in range(3):
        display.update("restore", 1024, 1024, "bytes")
    assert lines == []
