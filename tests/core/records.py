"""Cold-start records for tests: a plain one, and a strategy that makes sound ones of any shape."""

from __future__ import annotations

from hypothesis import strategies as st

from preheat.core.coldstart import MAIN, Attribute, ColdStart, Phase

SPAWNED_S = 1000.0


def phase(
    name: str, start_s: float, end_s: float, track: str = MAIN, **attributes: Attribute
) -> Phase:
    """Times count from the spawn."""
    return Phase(
        name=name,
        start_s=SPAWNED_S + start_s,
        end_s=SPAWNED_S + end_s,
        track=track,
        attributes=attributes,
    )


def record(
    *phases: Phase,
    first_token_s: float | None = 1.0,
    start_id: str = "chat-v1-0@1",
    unix_time_s: float = 1_760_000_000.0,
    model: str = "chat",
    page_cache_share: float | None = 1.0,
    outcome: str = "ready",
) -> ColdStart:
    return ColdStart(
        start_id=start_id,
        model=model,
        version="v1",
        engine="llama.cpp",
        unix_time_s=unix_time_s,
        spawned_s=SPAWNED_S,
        ready_s=None if first_token_s is None else SPAWNED_S + first_token_s,
        first_token_s=None if first_token_s is None else SPAWNED_S + first_token_s,
        outcome=outcome,
        bytes_read=98_362_432,
        page_cache_share=page_cache_share,
        phases=phases,
    )


def example() -> ColdStart:
    """A start of a second, whole but for 10 ms, with a second track."""
    return record(
        phase("process", 0.0, 0.1),
        phase("weights", 0.1, 0.6, bytes=98_362_432),
        phase("weights.read", 0.1, 0.2),
        phase("weights.hash", 0.2, 0.6, threads=2),
        phase("warmup", 0.61, 0.9),
        phase("warmup.prompt", 0.61, 0.7),
        phase("warmup.prompt", 0.7, 0.9),
        phase("publish", 0.9, 1.0),
        phase("start", 0.05, 0.95, "envoy"),
        phase("start.listen", 0.5, 0.95, "envoy"),
    )


@st.composite
def sound_records(draw: st.DrawFn) -> ColdStart:
    """Records whose phases nest and are named as they nest; times on a grid, so that they touch."""
    phases: list[Phase] = []
    for track in draw(st.sampled_from([(MAIN,), (MAIN, "envoy")])):
        _split(draw, phases, track, "", 0, 4096, depth=0)
    shuffled = draw(st.permutations(phases))
    return record(*shuffled, first_token_s=1.0)


def _split(
    draw: st.DrawFn, phases: list[Phase], track: str, above: str, low: int, high: int, *, depth: int
) -> None:
    cuts = sorted(draw(st.lists(st.integers(low, high), max_size=6 - 2 * depth)))
    for number, (start, end) in enumerate(zip(cuts[::2], cuts[1::2], strict=False)):
        name = f"{above}p{number}"
        phases.append(phase(name, start / 4096, end / 4096, track))
        if depth < 2 and draw(st.booleans()):
            _split(draw, phases, track, f"{name}.", start, end, depth=depth + 1)
