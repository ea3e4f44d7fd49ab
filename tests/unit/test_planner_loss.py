"""Telling lost nodes from late ones."""

from stoker.planner.core.loss import Presence, look
from stoker.planner.core.values import Limits

LIMITS = Limits(grace_s=20.0, mass_share=0.34, mass_grace_s=300.0, settle_s=15.0)
TEN = {f"n{number}" for number in range(10)}


def test_one_node_is_lost_after_its_grace_and_not_before() -> None:
    presence = look(Presence(), TEN, TEN, 0.0, LIMITS)
    presence = look(presence, TEN - {"n1"}, TEN, 100.0, LIMITS)
    assert look(presence, TEN - {"n1"}, TEN, 119.9, LIMITS).lost == frozenset()
    assert look(presence, TEN - {"n1"}, TEN, 120.0, LIMITS).lost == {"n1"}


def test_a_return_in_time_starts_the_grace_anew() -> None:
    presence = look(Presence(), TEN - {"n1"}, TEN, 0.0, LIMITS)
    presence = look(presence, TEN, TEN, 19.0, LIMITS)
    presence = look(presence, TEN - {"n1"}, TEN, 20.0, LIMITS)
    assert look(presence, TEN - {"n1"}, TEN, 39.0, LIMITS).lost == frozenset()
    assert presence.settling == frozenset()


def test_many_at_once_are_given_up_only_after_the_long_grace() -> None:
    away = {"n1", "n2", "n3", "n4"}
    presence = look(Presence(), TEN - away, TEN, 0.0, LIMITS)
    assert look(presence, TEN - away, TEN, 299.0, LIMITS).lost == frozenset()
    assert look(presence, TEN - away, TEN, 300.0, LIMITS).lost == away


def test_three_of_ten_are_within_the_share() -> None:
    away = {"n1", "n2", "n3"}
    presence = look(Presence(), TEN - away, TEN, 0.0, LIMITS)
    assert look(presence, TEN - away, TEN, 20.0, LIMITS).lost == away


def test_one_node_is_no_mass_even_if_it_is_all_there_is() -> None:
    presence = look(Presence(), set(), {"n1"}, 0.0, LIMITS)
    assert look(presence, set(), {"n1"}, 20.0, LIMITS).lost == {"n1"}


def test_a_node_given_up_settles_after_its_return_also_when_nothing_is_assigned_there_any_more() -> None:
    presence = look(Presence(), TEN - {"n1"}, TEN, 0.0, LIMITS)
    presence = look(presence, TEN - {"n1"}, TEN, 20.0, LIMITS)
    presence = look(presence, TEN - {"n1"}, TEN - {"n1"}, 30.0, LIMITS)
    assert presence.lost == {"n1"}
    presence = look(presence, TEN, TEN - {"n1"}, 40.0, LIMITS)
    assert (presence.lost, presence.settling) == (frozenset(), frozenset({"n1"}))
    assert look(presence, TEN, TEN, 54.9, LIMITS).settling == {"n1"}
    assert look(presence, TEN, TEN, 55.0, LIMITS).settling == frozenset()


def test_a_node_without_assignments_is_nobodys_loss() -> None:
    assert look(Presence(), TEN - {"n1"}, TEN - {"n1"}, 0.0, LIMITS) == Presence()
