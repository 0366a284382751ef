"""Statistics of one request: the table of `--stats` and the line of `--compare`. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from offload.metrics import LevelStats, LinkStats, Stats
from offload.units import size
from triforce_cli.ground.text import duration, lengths_of, levels_of, percent, significant

if TYPE_CHECKING:
    from offload.plan.planner import Plan


def stats_table(stats: Stats, plan: Plan) -> str:
    """The table of `--stats`: at most 80 columns, the same at a terminal and in a file."""
    lines = [*_summary(stats), "", *_levels(stats.levels), "", *_links(stats)]
    lines += [*_ranks(stats), *_plan(plan)]
    return "\n".join(lines)


def compared(stats: Stats, plain: Stats, *, greedy: bool) -> str:
    """The line of `--compare`. plain: statistics of the same request without speculation; greedy: both texts are the
    same."""
    ours, theirs = stats.milliseconds_per_token, plain.milliseconds_per_token
    if ours is None or theirs is None:
        return "the text is too short to be compared"
    num_timed = stats.output_tokens - 1
    text = "the text is the same" if greedy else "the text is sampled anew; at --temperature 0 it is the same"
    return (
        f"{stats.output_tokens:,} tokens in {duration(ours * num_timed / 1000)}; without speculation "
        f"{duration(theirs * num_timed / 1000)}, {theirs / ours:.1f} times as long, and {text}"
    )


def _summary(stats: Stats) -> list[str]:
    rows = [
        ("load", duration(stats.load_seconds), "", ""),
        (
            "prompt",
            duration(stats.prefill_seconds),
            _prompt_tokens(stats),
            f"{significant(stats.prompt_tokens_per_second)} tokens/s",
        ),
        ("first token", duration(stats.first_token_seconds), "after the start of prefill", ""),
        (
            "decode",
            duration(stats.decode_seconds),
            f"{stats.output_tokens:,} tokens",
            f"{significant(stats.decode_tokens_per_second)} tokens/s, "
            f"{significant(stats.milliseconds_per_token)} ms/token",
        ),
        ("refresh", duration(stats.refresh_seconds), "of decode: choosing and fetching chunks", ""),
    ]
    return [f"{name:<12}{time:>12}   {count:<15} {speed}".rstrip() for name, time, count, speed in rows]


def _prompt_tokens(stats: Stats) -> str:
    if not stats.reused_tokens:
        return f"{stats.prompt_tokens:,} tokens"
    return f"{stats.prompt_tokens - stats.reused_tokens:,} of {stats.prompt_tokens:,} new"


def _levels(levels: Sequence[LevelStats]) -> list[str]:
    header = ("level", "passes", "rows", "seconds", "ms/pass", "drafted", "acceptance", "tokens/round")
    rows: list[tuple[str, ...]] = [header]
    for level in levels:
        rows += [_level_cells(level), *_proposer_cells(level)]
    return [f"{r[0]:<11}{r[1]:>8}{r[2]:>8}{r[3]:>9}{r[4]:>9}{r[5]:>9}{r[6]:>12}{r[7]:>14}".rstrip() for r in rows]


def _proposer_cells(level: LevelStats) -> Iterator[tuple[str, ...]]:
    """Drafted tokens and acceptance by proposer, if there was more than one."""
    if len(level.drafted_by) < 2:
        return
    for name, drafted in sorted(level.drafted_by.items()):
        yield (f"  {name}", "", "", "", "", f"{drafted:,}", significant(level.accepted_by[name] / drafted), "")


def _level_cells(level: LevelStats) -> tuple[str, ...]:
    milliseconds = None if level.seconds_per_pass is None else 1000 * level.seconds_per_pass
    return (
        level.name,
        f"{level.passes:,}",
        f"{level.rows:,}",
        f"{level.seconds:,.2f}",
        significant(milliseconds),
        f"{level.drafted:,}",
        significant(level.acceptance),
        significant(level.tokens_per_round),
    )


def _links(stats: Stats) -> list[str]:
    if not any((link.bytes_to_device or link.bytes_to_host) for link in (stats.prefill_link, stats.decode_link)):
        return ["link        nothing moved", *_wanted(stats.decode_link)]
    return [
        f"link        prefill {_moved(stats.prefill_link)}",
        f"            decode  {_moved(stats.decode_link)}",
        f"            utilisation of full passes {significant(stats.link_utilisation)}, "
        f"idle for {significant(stats.link_idle)} of decode",
        *_wider(stats),
        *_wanted(stats.decode_link),
    ]


def _wanted(link: LinkStats) -> Iterator[str]:
    """Yield what decoding wanted of experts on the host or in the file, and of tables of n-grams in the file."""
    experts, disk, rows = link.experts, link.disk, link.ngram_rows
    if experts.hit_rate is not None:
        wanted = experts.hits + experts.misses
        where = "on the device" if link.bytes_to_device else "in memory"
        yield (
            f"experts     {wanted:,} wanted in decode, {percent(experts.hits, wanted)} % {where} already, "
            f"{size(experts.fetched_bytes)} fetched"
            + (f", {experts.by_cpu:,} run by the CPU" if experts.by_cpu else "")
        )
    if disk.reads:
        yield f"            {disk.reads:,} read from the file, {size(disk.num_bytes)} in {duration(disk.seconds)}"
    if wanted := rows.hits + rows.misses:
        yield f"n-grams     {wanted:,} rows wanted in decode, {percent(rows.hits, wanted)} % in memory already"


def _wider(stats: Stats) -> Iterator[str]:
    if stats.wider_layers:
        layers = "1 layer crosses" if stats.wider_layers == 1 else f"{stats.wider_layers} layers cross"
        yield f"            {layers} in 12 bits, not fewer: weights would not come back"


def _ranks(stats: Stats) -> Iterator[str]:
    """Yield the rows of several ranks while decoding: bytes over each one's link, and the time in sums, including the
    waiting for each other."""
    if not stats.ranks:
        return
    yield f"{'ranks':<12}{'device':<10}{'to device':>10}{'link':>10}{'sums':>10}{'of decode':>11}{'memory':>11}"
    for rank in stats.ranks:
        share = f"{percent(rank.sum_seconds, stats.decode_seconds)} %"
        yield (
            f"  {rank.rank:<10}{rank.device:<10}{size(rank.bytes_to_device):>10}{duration(rank.link_seconds):>10}"
            f"{duration(rank.sum_seconds):>10}{share:>11}{size(rank.device_bytes + rank.host_bytes):>11}"
        )


def _moved(link: LinkStats) -> str:
    return f"{size(link.bytes_to_device)} to device, {size(link.bytes_to_host)} to host"


def _plan(plan: Plan) -> list[str]:
    offload = ",".join(plan.placement.offload) or "none"
    return [
        f"plan        {levels_of(plan.composition)}",
        f"            {lengths_of(plan.composition)}",
        f"            {plan.request.dtype} on {plan.request.device}, offload {offload}",
        f"predicted   first token {duration(plan.predicted.first_token_seconds)}, "
        f"{significant(1000 * plan.predicted.seconds_per_token)} ms/token, "
        f"plain {significant(1000 * plan.predicted.plain_seconds_per_token)}"
        + (f", acceptance {plan.predicted.acceptance:.2f}" if plan.composition.gamma else ""),
    ]
