"""The number of drafts follows acceptance and cost: down to none, and back."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest

from paceline.engine.draft_length import AcceptanceRates, DraftLengthController, JudgedBlock, checked_draft_length
from paceline.engine.kind_costs import CostsByKind
from paceline.engine.step_cost import Costs
from paceline.engine.step_kind import GREEDY_STEP, GREEDY_TEXT, SAMPLED_STEP, StepAhead, StepKind, TextKind
from paceline.errors import RequestError

SAMPLED_TEXT = TextKind(is_sampled=True)
TEXTS = {GREEDY_STEP: GREEDY_TEXT, SAMPLED_STEP: SAMPLED_TEXT}


@dataclass
class LinearCosts:
    """A plain step takes 10 ms per request, a row and a draft some more, and keeping the context nothing at first."""

    row_ms: float
    draft_ms: float
    context_ms: float = 0.0

    def plain_ms(self, num_requests: int) -> float:
        return num_requests * (10 - self.context_ms)

    def padded_drafts(self, num_drafts: int) -> int:
        return num_drafts

    def verify_ms(self, num_requests: int, num_drafts: int) -> float:
        return num_requests * (10 + self.row_ms * num_drafts)

    def step_ms(self, num_requests: int, num_drafts: int) -> float:
        return self.verify_ms(num_requests, num_drafts) + num_requests * self.draft_ms * num_drafts


def controller_of(costs: Costs, num_draft_tokens: int = 7) -> DraftLengthController:
    """Chooses by the same costs for every kind."""
    return DraftLengthController(num_draft_tokens, CostsByKind(lambda _kind: costs))


def ahead(num_requests: int = 1, kind: StepKind = GREEDY_STEP) -> StepAhead:
    """A step whose requests are all of one kind, and all adapt."""
    return StepAhead(kind, num_requests, ((TEXTS[kind], num_requests),))


def observe(controller: DraftLengthController, num_drawn: int, num_accepted: int, kind: StepKind = GREEDY_STEP) -> None:
    """What became of one block."""
    controller.observe(kind, [JudgedBlock(TEXTS[kind], num_drawn, num_accepted)])


def run(
    controller: DraftLengthController,
    rate: float,
    num_steps: int,
    generator: random.Random,
    num_requests: int = 1,
    kind: StepKind = GREEDY_STEP,
) -> list[int]:
    """Serve blocks in which each draft is kept with one chance; returns the lengths chosen."""
    chosen = []
    waiting = 0
    for _ in range(num_steps):
        count = controller.next_num_drafts(ahead(num_requests, kind))
        blocks = []
        for _ in range(num_requests):
            accepted = next((i for i in range(waiting) if generator.random() >= rate), waiting)
            blocks.append(JudgedBlock(TEXTS[kind], waiting, accepted))
        controller.observe(kind, blocks)
        waiting = count
        chosen.append(count)
    return chosen


def test_modes() -> None:
    assert checked_draft_length("adaptive") == "adaptive"
    for wrong in ("on", None, 3, ["off"]):
        with pytest.raises(RequestError, match="draft_length"):
            checked_draft_length(wrong)


def test_before_anything_is_known_drafting_is_tried() -> None:
    assert controller_of(LinearCosts(0.5, 0.5)).next_num_drafts(ahead()) == 7


def test_perfect_drafts_keep_the_whole_block() -> None:
    controller = controller_of(LinearCosts(0.5, 0.5))
    assert set(run(controller, 1.0, 200, random.Random(0))) == {7}
    assert (controller.num_switched_off, controller.num_probes) == (0, 0)


def test_useless_drafts_are_switched_off_within_fifty_steps_and_probing_costs_little() -> None:
    costs = LinearCosts(1.0, 1.0)
    controller = controller_of(costs)
    chosen = run(controller, 0.0, 1000, random.Random(0))
    assert controller.num_drafts == 0
    assert all(count in (0, 7) for count in chosen[30:])
    spent_ms = sum(costs.step_ms(1, count) for count in chosen[50:])
    assert spent_ms < 1.03 * 10 * 950
    assert controller.num_switched_off == 1
    assert controller.num_probes == sum(count == 7 for count in chosen[chosen.index(0) :]) > 3


def test_it_comes_back_when_drafts_get_good_again() -> None:
    controller = controller_of(LinearCosts(1.0, 1.0))
    generator = random.Random(1)
    run(controller, 0.0, 300, generator)
    assert controller.num_drafts == 0
    later = run(controller, 0.95, 800, generator)
    assert min(later[-200:]) >= 5
    assert later.index(7) < 400


def test_it_gives_up_after_three_probes_and_tries_new_requests_after_that() -> None:
    controller = controller_of(LinearCosts(1.0, 1.0))
    while controller.num_probes < 3:
        assert not controller.has_given_up(GREEDY_STEP)
        assert controller.wants_another_request(ahead())
        observe(controller, controller.next_num_drafts(ahead()), 0)
    assert controller.has_given_up(GREEDY_STEP)
    assert not controller.wants_another_request(ahead())
    num_skipped = 0
    while not controller.wants_another_request(ahead()):
        controller.skip_step(GREEDY_STEP)
        num_skipped += 1
    assert 100 < num_skipped < 1000
    assert controller.next_num_drafts(ahead()) == 7  # its first block is a probe
    observe(controller, 7, 0)
    assert controller.has_given_up(GREEDY_STEP)
    observe(controller, 7, 7)
    assert not controller.has_given_up(GREEDY_STEP)


def test_one_probe_that_pays_in_time_keeps_it_from_giving_up() -> None:
    controller = controller_of(LinearCosts(1.0, 1.0))
    run(controller, 0.0, 40, random.Random(0))
    for _ in range(2000):
        if controller.next_num_drafts(ahead()) == 7:
            observe(controller, 7, 6 if controller.num_probes % 3 == 0 else 0)
        assert not controller.has_given_up(GREEDY_STEP)


def test_without_probes_it_never_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftLengthController, "_probe_interval", lambda _self, _kind: 10**9)
    controller = controller_of(LinearCosts(1.0, 1.0))
    run(controller, 0.0, 300, random.Random(1))
    assert set(run(controller, 0.95, 800, random.Random(1))) == {0}


@pytest.mark.parametrize(("rate", "row_ms"), [(0.8, 1.0), (0.6, 1.0), (0.9, 2.0), (0.7, 0.2)])
def test_it_settles_near_the_best_constant_length(rate: float, row_ms: float) -> None:
    costs = LinearCosts(row_ms, 0.3)
    paces = [sum(rate**i for i in range(count + 1)) / costs.step_ms(1, count) for count in range(8)]
    chosen = run(controller_of(costs), rate, 3000, random.Random(2))[200:]
    mean_pace = sum(paces[count] for count in chosen) / len(chosen)
    assert mean_pace > 0.95 * max(paces)


def test_larger_batches_get_fewer_drafts_where_rows_cost_more() -> None:
    class Crowded(LinearCosts):
        def verify_ms(self, num_requests: int, num_drafts: int) -> float:
            return 10 + max(0, num_requests * (1 + num_drafts) - 16) * self.row_ms

        def step_ms(self, num_requests: int, num_drafts: int) -> float:
            return self.verify_ms(num_requests, num_drafts) + 0.1 * num_drafts

    controller = controller_of(Crowded(1.0, 0.0))
    run(controller, 0.7, 500, random.Random(3))
    lengths = [controller.next_num_drafts(ahead(size)) for size in (1, 4, 16, 64)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 7
    assert lengths[-1] < 3


def test_the_choice_is_the_pasts_alone() -> None:
    """Whatever happens to a block, its own length was fixed before; the same past gives the same length."""
    lengths = []
    for outcome in (0, 7):
        controller = controller_of(LinearCosts(1.0, 1.0))
        run(controller, 0.6, 50, random.Random(4))
        lengths.append(controller.next_num_drafts(ahead()))
        observe(controller, 7, outcome)
    assert lengths[0] == lengths[1]


def test_rates_follow_recent_blocks_and_a_position_starts_from_the_one_before() -> None:
    rates = AcceptanceRates(3)
    assert rates.rates() == [1, 1, 1]
    for _ in range(300):
        rates.observe([(3, 1)])  # the first is kept, the second refused, of the third nothing is known
    first, second, third = rates.rates()
    assert first > 0.99
    assert second < 0.05
    assert third == pytest.approx(second)
    for _ in range(300):
        rates.observe([(1, 1)])  # shorter blocks: what is no longer drafted fades
    assert rates.rates()[1] > 0.9


def test_a_trial_step_that_was_disturbed_does_not_end_drafting_for_good() -> None:
    controller = controller_of(LinearCosts(0.1, 1000.0))
    while not controller.has_given_up(GREEDY_STEP):
        observe(controller, controller.next_num_drafts(ahead()), 0)
    num_skipped = 0
    while not controller.wants_another_request(ahead()):
        controller.skip_step(GREEDY_STEP)
        num_skipped += 1
    assert num_skipped <= 1000


def test_blocks_without_drafts_tell_nothing() -> None:
    controller = controller_of(LinearCosts(1.0, 1.0), 3)
    for _ in range(50):
        observe(controller, 0, 0)
    assert controller.next_num_drafts(ahead()) == 3


def test_thresholds_rise_with_a_rows_cost() -> None:
    for row_ms in (0.0, 1.0):
        controller = controller_of(LinearCosts(row_ms, 0.0), 4)
        thresholds = controller.thresholds(ahead(), 4)
        # All drafts are taken to be good at first: 5 tokens in 10 + 4 rows ms.
        assert thresholds == pytest.approx([row_ms * 5 / (10 + 4 * row_ms)] * 4)
    assert max(controller_of(LinearCosts(1e9, 0.0), 4).thresholds(ahead(), 4)) <= 1


# Kinds


class SampledCostMore(LinearCosts):
    """A sampled row costs ten times what a greedy one does."""

    def __init__(self, kind: StepKind) -> None:
        super().__init__(row_ms=5.0 if kind.is_sampled else 0.5, draft_ms=0.2)


@pytest.mark.parametrize("is_planted", [False, True])
def test_a_length_that_pays_greedily_may_not_pay_where_a_sampled_row_costs_more(is_planted: bool) -> None:
    """Planted: sampled steps are taken to cost what greedy ones do, as they once were."""
    measured = [GREEDY_STEP if is_planted else SAMPLED_STEP]
    costs = CostsByKind(lambda kind: SampledCostMore(measured[0] if kind.is_sampled else kind))
    controller = DraftLengthController(7, costs)
    sampled = run(controller, 0.3, 400, random.Random(5), kind=SAMPLED_STEP)[100:]
    really = SampledCostMore(SAMPLED_STEP)
    tokens = sum(sum(0.3**i for i in range(count + 1)) for count in sampled)
    pace = tokens / sum(really.step_ms(1, count) for count in sampled) * really.plain_ms(1)
    assert (pace < 0.9) if is_planted else (pace > 0.97), "plain decoding is 1"
    assert min(run(controller, 0.8, 300, random.Random(6))[100:]) >= 3, "greedy steps are drafted for all the same"


def test_what_sampled_text_refuses_does_not_count_against_greedy_text() -> None:
    controller = controller_of(LinearCosts(1.0, 1.0))
    run(controller, 0.0, 600, random.Random(0), kind=SAMPLED_STEP)
    assert controller.is_off(SAMPLED_STEP) and controller.has_given_up(SAMPLED_STEP)
    assert not controller.has_given_up(GREEDY_STEP) and controller.wants_another_request(ahead())
    assert controller.next_num_drafts(ahead()) == 7


def test_a_mixed_batch_gets_what_all_of_its_requests_together_gain_by() -> None:
    """Rows are shared, so two requests that draft well carry one that does not, and not six."""
    controller = controller_of(LinearCosts(1.0, 0.5))
    for kind, rate in ((GREEDY_STEP, 0.9), (SAMPLED_STEP, 0.0)):
        for _ in range(200):
            drafts = [JudgedBlock(TEXTS[kind], 7, 7 if rate > 0 else 0)] * 4
            controller.observe(kind, drafts)

    def best(num_greedy: int, num_sampled: int) -> int:
        mixed = StepAhead(
            SAMPLED_STEP, num_greedy + num_sampled, ((GREEDY_TEXT, num_greedy), (SAMPLED_TEXT, num_sampled))
        )
        return DraftLengthController._best(controller, mixed, 0)

    assert [best(2, 1), best(2, 6), best(0, 3)] == [7, 7, 0]
    assert best(1, 9) == 0


def test_beside_a_block_that_is_drawn_anyway_drafts_cost_nothing_more() -> None:
    controller = controller_of(LinearCosts(100.0, 100.0))
    for _ in range(50):
        observe(controller, 7, 2)
    alone = StepAhead(GREEDY_STEP, 2, ((GREEDY_TEXT, 1),))
    assert controller.next_num_drafts(alone) == 0
    assert controller.next_num_drafts(alone._replace(num_fixed=7)) >= 2
    assert controller.believed_ms(alone._replace(num_fixed=7)) == [2 * 1410] * 8


def test_plain_decoding_is_what_drafting_has_to_beat_and_it_keeps_no_context() -> None:
    """Steps with a context cost 10 ms, those of an engine without a drafter 7: 1.3 tokens in 11 ms are too few."""
    for context_ms, pays in ((0.0, True), (3.0, False)):
        controller = controller_of(LinearCosts(0.5, 0.5, context_ms), 1)
        for _ in range(100):
            controller.observe(GREEDY_STEP, [JudgedBlock(GREEDY_TEXT, 1, index % 10 < 3) for index in range(10)])
        assert (controller.next_num_drafts(ahead(10)) > 0) == pays


@pytest.mark.parametrize("num_requests", [1, 8])
def test_the_context_is_not_kept_for_long_where_drafting_does_not_pay(num_requests: int) -> None:
    """It costs time in every step, so what is to be found out is found out soon, and three blocks are enough."""
    controller = controller_of(LinearCosts(1.0, 1.0, 1.0))
    num_steps = 0
    while not controller.has_given_up(GREEDY_STEP):
        count, num_steps = controller.next_num_drafts(ahead(num_requests)), num_steps + 1
        controller.observe(GREEDY_STEP, [JudgedBlock(GREEDY_TEXT, count, 0)] * num_requests)
    assert num_steps < (60 if num_requests == 1 else 24)
    assert controller.num_probes == (3 if num_requests == 1 else 1)


def test_blocks_that_were_under_way_when_drafting_stopped_are_no_probe() -> None:
    controller = controller_of(LinearCosts(1.0, 1.0))
    for _ in range(40):
        controller.observe(GREEDY_STEP, [JudgedBlock(GREEDY_TEXT, 7, 0)] * 8)
    assert controller.next_num_drafts(ahead(8)) == 0
    for accepted in (0, 7):
        controller.observe(GREEDY_STEP, [JudgedBlock(GREEDY_TEXT, 7, accepted)] * 8)
        assert not controller.has_given_up(GREEDY_STEP)
    assert controller.next_num_drafts(ahead(8)) == 0, "one step in fifty, not one in three"


def test_what_was_given_up_with_many_requests_is_not_given_up_with_few() -> None:
    """And the other way round where the host is what plain steps wait for: costs decide, chances are known."""

    class Crowded(LinearCosts):
        def verify_ms(self, num_requests: int, num_drafts: int) -> float:
            return 10 + max(0, num_requests * num_drafts - 8) * self.row_ms

        def step_ms(self, num_requests: int, num_drafts: int) -> float:
            return self.verify_ms(num_requests, num_drafts) + self.draft_ms * num_drafts

        def plain_ms(self, num_requests: int) -> float:
            return 10.0

    controller = controller_of(Crowded(1.0, 0.2))
    run(controller, 0.3, 300, random.Random(1), num_requests=64)
    assert controller.has_given_up(GREEDY_STEP)
    assert not controller.wants_another_request(ahead(64))
    assert controller.wants_another_request(ahead(2))
    assert not controller.has_given_up(GREEDY_STEP), "or the new ones would lose their context at once"
    assert controller.next_num_drafts(ahead(2)) > 0


def test_a_newcomer_that_drafts_well_does_not_make_every_step_a_probe() -> None:
    """It brings drafting back for those that come after it; the 31 that lost their context gain nothing."""
    controller = controller_of(LinearCosts(1.0, 1.0))
    run(controller, 0.0, 300, random.Random(1), num_requests=32)
    assert controller.has_given_up(GREEDY_STEP)
    one_of_32 = StepAhead(GREEDY_STEP, 32, ((GREEDY_TEXT, 1),))
    num_before, waiting = controller.num_probes, 0
    for _ in range(320):
        planned = controller.next_num_drafts(one_of_32)
        controller.observe(GREEDY_STEP, [JudgedBlock(GREEDY_TEXT, waiting, min(waiting, 3))])
        waiting = planned
    assert not controller.has_given_up(GREEDY_STEP)
    assert 0 < controller.num_probes - num_before < 320 / 14


# Many requests


def test_a_probe_pays_if_its_blocks_do_on_average() -> None:
    """Among 32 blocks there is always a lucky one; if that were enough, every second step would be a probe."""
    controller = controller_of(LinearCosts(1.0, 1.0))
    generator = random.Random(0)
    chosen = run(controller, 0.15, 3000, generator, num_requests=32)[200:]
    assert controller.is_off(GREEDY_STEP)
    assert sum(count > 0 for count in chosen) < 0.05 * len(chosen)
    for accepted, pays in ((1, False), (2, True)):  # with all drafts a step costs 2.4 plain ones
        switched = controller_of(LinearCosts(1.0, 1.0))
        run(switched, 0.0, 600, random.Random(1))
        blocks = [JudgedBlock(GREEDY_TEXT, 7, accepted)] * 31 + [JudgedBlock(GREEDY_TEXT, 7, 7 * (not pays))]
        assert switched.has_given_up(GREEDY_STEP)
        switched.observe(GREEDY_STEP, blocks)
        assert switched.has_given_up(GREEDY_STEP) != pays


@pytest.mark.parametrize("num_requests", [1, 64])
def test_the_choice_rests(num_requests: int) -> None:
    """What 64 say in one step does not outweigh what they said in the 49 before, and lengths that are as good as each
    other do not take turns."""
    controller = controller_of(LinearCosts(0.6, 0.4))
    chosen = run(controller, 0.6, 600, random.Random(0), num_requests=num_requests)[50:]
    changes = sum(before != after for before, after in itertools.pairwise(chosen))
    assert changes <= 8


# First blocks


@dataclass
class FixedCosts(LinearCosts):
    """A step of any size takes 10 ms, and drawing drafts 4 more, as on a device that is never full."""

    def plain_ms(self, num_requests: int) -> float:
        return 10.0

    def verify_ms(self, num_requests: int, num_drafts: int) -> float:
        return 10.0

    def step_ms(self, num_requests: int, num_drafts: int) -> float:
        return 14.0 if num_drafts > 0 else 10.0


def test_a_pass_for_first_blocks_alone_has_to_pay_for_the_time_of_all() -> None:
    """By hand: 14 ms give each of R requests 8 tokens, so 4 ms are worth 2.29 R; a first block is worth 7 of them."""
    controller = controller_of(FixedCosts(0.0, 0.0))
    run(controller, 1.0, 50, random.Random(0))
    for num_requests, num_prompts, pays in ((1, 1, True), (3, 1, True), (4, 1, False), (32, 10, False), (32, 11, True)):
        assert controller.pays_behind_prompts(ahead(num_requests), ahead(num_prompts)) is pays, (
            num_requests,
            num_prompts,
        )


def test_drafts_that_are_kept_seldom_pay_for_no_pass_of_their_own() -> None:
    """2 tokens a step on average: 4 of 14 ms are worth 0.57 R, a first block is worth 1."""
    controller = controller_of(FixedCosts(0.0, 0.0))
    run(controller, 0.5, 3000, random.Random(0))
    assert controller.pays_behind_prompts(ahead(1), ahead(1))
    assert not controller.pays_behind_prompts(ahead(2), ahead(1))


def test_first_blocks_are_worth_what_they_give_whoever_else_is_in_the_step() -> None:
    """By hand: beside two that do not adapt 14 ms give 10 tokens, so 4 ms are worth 2.9; a first block is worth 7."""
    controller = controller_of(FixedCosts(0.0, 0.0))
    run(controller, 1.0, 50, random.Random(0))
    one_of_three = StepAhead(GREEDY_STEP, 3, ((GREEDY_TEXT, 1),))
    assert controller.pays_behind_prompts(one_of_three, ahead(1))
    hardly_kept = StepAhead(GREEDY_STEP, 1, ((TextKind(has_rules=True), 1),))
    for _ in range(100):
        controller.observe(GREEDY_STEP, [JudgedBlock(TextKind(has_rules=True), 7, 0)])
        observe(controller, 7, 7)
    assert not controller.pays_behind_prompts(one_of_three, hardly_kept)


def test_probes_are_not_left_out() -> None:
    controller = controller_of(LinearCosts(1.0, 1.0))
    run(controller, 0.0, 300, random.Random(0))
    assert controller.is_off(GREEDY_STEP)
    assert controller.pays_behind_prompts(ahead(32), ahead(1))


def test_rows_that_are_judged_in_any_case_are_no_cost_of_the_pass() -> None:
    """Drawing costs nothing here; that seven rows cost 7 ms is a matter of the step behind."""
    controller = controller_of(LinearCosts(1.0, 0.0))
    run(controller, 1.0, 50, random.Random(0))
    assert controller.pays_behind_prompts(ahead(64), ahead(1))
