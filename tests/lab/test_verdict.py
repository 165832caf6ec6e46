"""What to run, and why not: traps 1, 3 and 22 of the reference, and the rules of DESIGN."""

from dataclasses import replace

import pytest
from report_samples import cell, drafted, grid

from slipstream.lab.arms import parse_arm
from slipstream.lab.results import GridResult, Interval, Resolution
from slipstream.lab.verdict import Cause, crossovers, diagnose, find_cause, resolve, verdicts
from slipstream.types import StageTimes


def result_of(*cells):
    return GridResult("run", "title", {}, tuple(cells), (), ())


def only(*cells):
    (verdict,) = verdicts(result_of(*cells))
    return verdict


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        (Interval(1.1, 1.01, 1.2), Resolution.FASTER),
        (Interval(0.9, 0.8, 0.99), Resolution.SLOWER),
        (Interval(1.1, 0.99, 1.2), Resolution.NOT_RESOLVED),
        (Interval(1.1, 1.0, 1.2), Resolution.NOT_RESOLVED),
        (Interval(3.0), Resolution.NOT_RESOLVED),
        (None, Resolution.NOT_RESOLVED),
    ],
)
def test_resolve(interval, expected):
    assert resolve(interval) is expected


def trap_one_cells(users):
    """Draft 2 ms + verify 10 ms up to 8 users, 30 ms above; plain step 10 ms; 3 tokens a step."""
    verify = 10.0 if users <= 8 else 30.0
    value = 10.0 / ((2.0 + verify) / 3.0)
    plain = cell(users=users, stage_ms=StageTimes(0.0, 10.0, 0.0, 0.0), label="simulated")
    arm = drafted(
        "dflash:7",
        (value * 0.98, value * 1.02),
        value=value,
        tokens_per_step=3.0,
        users=users,
        stage_ms=StageTimes(2.0, verify, 0.0, 0.0),
        label="simulated",
    )
    return plain, arm


def test_trap_1_crossover_between_8_and_16_users():
    cells = [c for users in (1, 4, 8, 16, 32) for c in trap_one_cells(users)]
    by_users = {v.users: v for v in verdicts(result_of(*cells))}
    assert [by_users[u].run for u in (1, 4, 8)] == ["dflash:7"] * 3
    assert [by_users[u].run for u in (16, 32)] == ["none"] * 2
    assert by_users[16].resolution is Resolution.SLOWER
    (line,) = crossovers(result_of(*cells))
    assert "on at 8 users" in line
    assert "off at 16 users" in line
    assert "simulated" in line
    advice = " ".join(by_users[16].advice)
    assert "verify got dear" in advice
    assert "verify alone 3.00×" in advice


def test_trap_3_dear_verification_says_do_not_speculate():
    plain = cell(stage_ms=StageTimes(0.0, 10.0, 0.0, 0.0))
    arm = drafted(
        "draft_model:X:4",
        (0.75, 0.79),
        value=2.0 / 2.6,
        tokens_per_step=2.0,
        stage_ms=StageTimes(0.0, 26.0, 0.0, 0.0),
    )
    verdict = only(plain, arm)
    assert verdict.run == "none"
    assert verdict.resolution is Resolution.SLOWER
    (text,) = verdict.advice
    assert "do not speculate" in text
    assert "2.60×" in text
    assert "2.00 tokens" in text


def test_trap_3_without_stage_times_the_cost_follows_from_efficiency():
    arm = drafted("mtp:4", (0.75, 0.79), value=2.0 / 2.6, tokens_per_step=2.0, stage_ms=None)
    (text,) = only(cell(stage_ms=None), arm).advice
    assert "2.60×" in text
    assert "do not speculate" in text


def test_trap_22_collapsed_acceptance_is_not_dear_verification():
    plain = cell(stage_ms=StageTimes(0.0, 10.0, 0.0, 0.0))
    dear = StageTimes(0.0, 26.0, 0.0, 0.0)
    collapsed = drafted(
        "eagle3:3", (0.3, 0.5), tokens_per_step=1.04, acceptance_length=1.05, stage_ms=dear
    )
    costly = drafted("mtp:3", (0.8, 0.9), tokens_per_step=2.2, stage_ms=dear)
    assert find_cause(collapsed, plain) is Cause.ACCEPTANCE_COLLAPSED
    assert find_cause(costly, plain) is Cause.VERIFY_DEAR
    assert "fits this target" in diagnose(collapsed, plain)


def test_rare_drafts_that_hold_are_their_own_case():
    rare = drafted("ngram:3", (0.98, 1.03), tokens_per_step=1.05, acceptance_length=2.8)
    assert find_cause(rare, cell()) is Cause.RARE_DRAFTS


def test_the_stage_that_grew_is_named():
    plain = cell(stage_ms=StageTimes(0.0, 10.0, 1.0, 1.0))
    dear_draft = drafted("mtp:3", (0.8, 0.9), stage_ms=StageTimes(9.0, 11.0, 1.0, 1.0))
    dear_host = drafted("mtp:3", (0.8, 0.9), stage_ms=StageTimes(1.0, 11.0, 1.0, 9.0))
    assert find_cause(dear_draft, plain) is Cause.DRAFT_DEAR
    assert find_cause(dear_host, plain) is Cause.HOST_DEAR


def test_best_lower_bound_wins_over_best_value():
    wide = drafted("suffix", (1.02, 2.4), value=1.6)
    tight = drafted("ngram:3", (1.25, 1.35), value=1.3)
    assert only(cell(), wide, tight).run == "ngram:3"


@pytest.mark.parametrize(
    ("first", "second", "winner"),
    [
        ("ngram:8", "ngram:3", "ngram:3"),
        ("draft_model:/m/7b:2", "suffix", "suffix"),
        ("DFlash2 k7", "MTP k2", "MTP k2"),
    ],
)
def test_ties_go_to_the_simpler_then_shallower_arm(first, second, winner):
    arms = [drafted(first, (1.505, 1.6), value=1.55), drafted(second, (1.50, 1.6), value=1.55)]
    assert only(cell(), *arms).run == winner
    assert only(cell(), *reversed(arms)).run == winner


def test_arms_held_back_are_never_recommended_but_named():
    held = drafted("suffix", (1.8, 2.0), value=1.9, publishable=False, reasons=("needle failed",))
    verdict = only(cell(), held, drafted("ngram:3", (0.97, 1.04)))
    assert verdict.run == "none"
    assert verdict.resolution is Resolution.NOT_RESOLVED
    assert any("held back: needle failed" in text for text in verdict.advice)


def test_nothing_to_compare_is_said():
    verdict = only(drafted("mtp:3", None))
    assert verdict.run == "none"
    assert verdict.best is None
    assert "no arm has a matched baseline" in verdict.sentence
    held = drafted("mtp:3", (1.2, 1.3), publishable=False, reasons=("json failed",))
    assert "every arm with a matched baseline is held back" in only(cell(), held).sentence


def test_all_slower_is_slower_and_one_open_arm_leaves_it_open():
    slow = drafted("ngram:8", (0.5, 0.6), value=0.55)
    assert only(cell(), slow).resolution is Resolution.SLOWER
    open_arm = drafted("ngram:3", (0.95, 1.05))
    assert only(cell(), slow, open_arm).resolution is Resolution.NOT_RESOLVED


@pytest.mark.parametrize(
    ("deep", "words"),
    [
        ((1.5, 1.6), "deeper pays"),
        ((1.0, 1.1), "stay at ngram:3"),
        ((1.2, 1.4), "not resolved, so the shallower"),
    ],
)
def test_depth_advice_for_arms_that_differ_in_draft_len_only(deep, words):
    arms = (
        drafted("ngram:8", deep, value=sum(deep) / 2),
        drafted("ngram:3", (1.25, 1.35), value=1.3),
    )
    assert any(words in text for text in only(cell(), *arms).advice)


def test_no_depth_advice_across_methods_or_batches():
    arms = [drafted("ngram:8", (1.5, 1.6)), drafted("suffix:3", (1.2, 1.3))]
    assert not any("Depth" in text for text in only(cell(), *arms).advice)
    elsewhere = drafted("ngram:3", (1.2, 1.3), batch="another")
    assert not any("Depth" in text for text in only(cell(), arms[0], elsewhere).advice)


def test_throughput_may_fall_while_latency_improves():
    plain = cell(users=16, ms_per_token=Interval(9.5))
    arm = drafted("dflash:7", (0.85, 0.93), users=16, value=0.89, ms_per_token=Interval(7.3))
    assert any("9.5 to 7.3" in text for text in only(plain, arm).advice)
    same = replace(arm, ms_per_token=Interval(9.9))
    assert not any("each user's" in text for text in only(plain, same).advice)


@pytest.mark.parametrize(
    ("name", "method", "depth", "stem"),
    [
        ("ngram:3", "ngram", 3, "ngram:k"),
        ("suffix", "suffix", None, "suffix"),
        ("draft_model:/m/v2:4", "draft_model", 4, "draft_model:/m/v2:k"),
        ("draft_model:/m/qwen:7b:4", "draft_model", 4, "draft_model:/m/qwen:7b:k"),
        ("MTP k5 · FA backend", "mtp", 5, "MTP k · FA backend"),
        ("n-gram k3", "ngram", 3, "n-gram k"),
        ("none", "none", None, "none"),
    ],
)
def test_parse_arm(name, method, depth, stem):
    arm = parse_arm(name)
    assert (arm.method, arm.draft_len, arm.stem) == (method, depth, stem)


def test_every_cell_of_a_grid_gets_one_verdict():
    judged = verdicts(grid())
    assert len(judged) == 7
    assert {v.run for v in judged} == {"none", "suffix", "ngram:3"}


def test_the_bar_written_before_the_run_decides_what_faster_means():
    arm = drafted("ngram:3", (1.02, 1.06), value=1.04)
    low, high = (
        replace(result_of(cell(), arm), meta={"bars": {"speedup": b}}) for b in (1.0, 1.05)
    )
    assert verdicts(low)[0].run == "ngram:3"
    (verdict,) = verdicts(high)
    assert verdict.run == "none"
    assert verdict.resolution is Resolution.NOT_RESOLVED
    assert "bar of 1.05×" in verdict.sentence


def test_steps_that_pay_are_not_blamed_for_a_wide_interval():
    """2.26 tokens for 1.07 plain steps and [0.76, 5.90]: the prompts differ, no stage is dear."""
    plain = cell(stage_ms=StageTimes(0.0, 10.0, 0.0, 0.0))
    arm = drafted(
        "ngram:3",
        (0.76, 5.9),
        value=2.11,
        tokens_per_step=2.26,
        stage_ms=StageTimes(0.1, 10.6, 0.0, 0.0),
    )
    (text,) = only(plain, arm).advice
    assert "its steps pay, 2.26 tokens for 1.07×" in text
    assert "dear" not in text
    close = replace(arm, tokens_per_step=1.16)
    assert "verify got dear" in diagnose(close, plain)
