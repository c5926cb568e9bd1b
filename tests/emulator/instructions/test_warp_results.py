"""Instructions between the lanes of a warp, by the semantics of the PTX ISA."""

from __future__ import annotations

import numpy as np
import pytest

from emulator.errors import UnsupportedInstruction
from emulator.programs.lane_programs import run_lanes

LANES = np.arange(32, dtype=np.uint32)
VALUES = np.random.default_rng(1).integers(0, 1 << 32, 32, np.uint32)


def shuffled(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """Source lane and predicate, step by step as the ISA writes it."""
    bval, cval, segmask = b & 31, c & 31, c >> 8 & 31
    max_lane = lane & segmask | cval & ~segmask
    min_lane = lane & segmask
    if mode == "up":
        j = lane - bval
        valid = j >= max_lane
    elif mode == "down":
        j = lane + bval
        valid = j <= max_lane
    elif mode == "bfly":
        j = lane ^ bval
        valid = j <= max_lane
    else:
        j = min_lane | bval & ~segmask & 31
        valid = j <= max_lane
    return (j if valid else lane), valid


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("c", [0x1F, 0, 0x181F, 0x1800, 0x1C07, 0x100F])
@pytest.mark.parametrize("b", [0, 1, 5, 16, 31, 33])
def test_shuffles(mode: str, b: int, c: int) -> None:
    body = f"""
        .reg .pred %p, %q; .reg .b32 %b, %c; mov.u32 %b, {b}; mov.u32 %c, {c};
        shfl.sync.{mode}.b32 %d0|%p, %a0, {b}, {c}, -1;
        selp.u32 %d1, 1, 0, %p;
        shfl.sync.{mode}.b32 %d2|%q, %a0, %b, %c, 0xffffffff;
        selp.u32 %d3, 1, 0, %q;
    """
    got = run_lanes(body, [VALUES], [np.uint32] * 4)
    for lane in range(32):
        source, valid = shuffled(mode, lane, b, c)
        for result, predicate in ((got[0], got[1]), (got[2], got[3])):
            assert (result[lane], predicate[lane]) == (VALUES[source], valid)


def test_votes_of_groups() -> None:
    masks = np.where(LANES < 8, 0xFF, 0xFFFFFF00).astype(np.uint32)
    flags = ((LANES % 3 == 0) | (LANES < 8)).astype(np.uint32)
    body = """
        .reg .pred %p, %a, %o, %u;
        setp.ne.u32 %p, %a0, 0;
        vote.sync.all.pred %a, %p, %a1; vote.sync.any.pred %o, !%p, %a1;
        vote.sync.uni.pred %u, %p, %a1; vote.sync.ballot.b32 %d3, %p, %a1;
        selp.u32 %d0, 1, 0, %a; selp.u32 %d1, 1, 0, %o; selp.u32 %d2, 1, 0, %u;
    """
    every, none, same, ballot = run_lanes(body, [flags, masks], [np.uint32] * 4)
    assert every.tolist() == [1] * 8 + [0] * 24
    assert none.tolist() == [0] * 8 + [1] * 24
    assert same.tolist() == [1] * 8 + [0] * 24
    bits = sum(int(flag) << lane for lane, flag in enumerate(flags))
    assert ballot.tolist() == [bits & 0xFF] * 8 + [bits & 0xFFFFFF00] * 24


def test_matches() -> None:
    values = (LANES // 5 % 3).astype(np.uint32)
    body = """
        .reg .pred %p; .reg .b64 %w;
        match.any.sync.b32 %d0, %a0, -1;
        match.all.sync.b32 %d1|%p, %a0, -1; selp.u32 %d2, 1, 0, %p;
        mov.u64 %w, 7; match.all.sync.b64 %d3, %w, -1;
    """
    some, every, same, constant = run_lanes(body, [values], [np.uint32] * 4)
    for lane in range(32):
        assert some[lane] == sum(1 << i for i in range(32) if values[i] == values[lane])
    assert (every == 0).all()
    assert (same == 0).all()
    assert (constant == 0xFFFFFFFF).all()


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("add.u32", lambda v: int(v.astype(np.uint64).sum()) & 0xFFFFFFFF),
        ("min.s32", lambda v: int(v.view(np.int32).min()) & 0xFFFFFFFF),
        ("max.u32", lambda v: int(v.max())),
        ("and.b32", lambda v: int(np.bitwise_and.reduce(v))),
        ("or.b32", lambda v: int(np.bitwise_or.reduce(v))),
        ("xor.b32", lambda v: int(np.bitwise_xor.reduce(v))),
    ],
)
def test_reductions(name: str, function: object) -> None:
    masks = np.where(LANES < 8, 0xFF, 0xFFFFFF00).astype(np.uint32)
    (got,) = run_lanes(f"redux.sync.{name} %d0, %a0, %a1;", [VALUES, masks], [np.uint32])
    assert callable(function)
    assert got.tolist() == [function(VALUES[:8])] * 8 + [function(VALUES[8:])] * 24


def test_float_reductions() -> None:
    values = np.linspace(-4, 3, 32, dtype=np.float32)
    values[3] = np.nan
    body = """
        redux.sync.min.f32 %d0, %a0, -1; redux.sync.max.abs.f32 %d1, %a0, -1;
        redux.sync.max.NaN.f32 %d2, %a0, -1;
    """
    low, far, nan = run_lanes(body, [values.view(np.uint32)], [np.uint32] * 3)
    assert low.view(np.float32)[0] == -4
    assert far.view(np.float32)[0] == 4
    assert nan[0] == 0x7FFFFFFF


def test_one_lane_is_elected() -> None:
    body = """
        .reg .pred %p; elect.sync %d0|%p, -1; selp.u32 %d1, 1, 0, %p;
    """
    leader, elected = run_lanes(body, [VALUES], [np.uint32] * 2)
    assert len(set(leader.tolist())) == 1
    assert elected.sum() == 1
    assert elected[leader[0]] == 1


def test_activemask_under_a_guard() -> None:
    body = """
        .reg .pred %p; setp.lt.u32 %p, %t, 5; mov.u32 %d0, 0;
        @%p activemask.b32 %d0;
    """
    (got,) = run_lanes(body, [VALUES], [np.uint32])
    assert got.tolist() == [0x1F] * 5 + [0] * 27


def test_unknown_modes_are_refused() -> None:
    with pytest.raises(UnsupportedInstruction, match=r"redux\.sync\.add\.f32"):
        run_lanes("redux.sync.add.f32 %d0, %a0, -1;", [VALUES], [np.uint32])
