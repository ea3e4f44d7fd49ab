"""The order in which an agent tries registries."""

from __future__ import annotations

from random import Random

from stoker.registry.core.places import Places


def test_a_lost_home_leads_to_the_next_at_once() -> None:
    places = Places(3)
    assert places.lost(served=True) == 0
    assert places.at == 1


def test_elsewhere_lost_leads_home_first() -> None:
    places = Places(3, at=2)
    assert places.lost(served=True) == 0
    assert places.at == 0


def test_a_whole_round_in_vain_is_followed_by_a_pause() -> None:
    places = Places(3)
    pauses = []
    visited = []
    for _ in range(7):
        visited.append(places.at)
        pauses.append(places.lost(served=False))
    assert visited == [0, 1, 2, 0, 1, 2, 0]
    assert pauses == [0, 0, 1, 0, 0, 2, 0]


def test_a_single_place_is_tried_again_after_a_pause_and_served_time_forgets_failures() -> None:
    places = Places(1)
    assert [places.lost(served=False) for _ in range(3)] == [1, 2, 3]
    assert places.lost(served=True) == 1
    assert places.at == 0


def test_every_place_is_tried_in_every_round_whatever_came_before() -> None:
    rng = Random(7)
    for count in range(1, 6):
        places = Places(count)
        for _ in range(200):
            for _ in range(rng.randrange(4)):
                places.lost(served=rng.random() < 0.5)
            if rng.random() < 0.2:
                places.go_home()
            places.lost(served=True)
            visited = set()
            for _ in range(count):
                visited.add(places.at)
                places.lost(served=False)
            assert visited == set(range(count)), "seed 7"
