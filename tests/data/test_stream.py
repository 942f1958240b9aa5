from __future__ import annotations

import collections
import dataclasses
import json
import random

import pytest
from data_fakes import TOKENIZER, numbered

from jrl.tasks.data.held_out import held_out
from jrl.tasks.data.order import open_order
from jrl.tasks.data.prompts import Data, dropped_prompts, is_held_out
from jrl.tasks.data.stream import open_stream
from jrl.tasks.data.survey import texts_of
from jrl.tasks.envs.addition import Addition, open_addition
from jrl.tasks.envs.contract import Generated
from jrl.tasks.example import Example, Message, visit_uid
from jrl.tasks.stopping import StopRequested

EVERYTHING = Data(prompt_length=32, held_out_every=None)


def stream_of(source, config=EVERYTHING, **options):
    return open_stream(source, TOKENIZER, config, **{"seed": 0, **options})


def test_random_kills_resume_exactly_and_every_epoch_is_whole(trials):
    draw = random.Random(0)
    for trial in range(trials(500, 5_000)):
        size, batch, epochs = draw.randrange(1, 40), draw.randrange(1, 9), draw.randrange(1, 5)
        config = Data(prompt_length=32, held_out_every=draw.choice([None, 3]))
        train = [i for i in range(size) if not is_held_out(numbered(size)[i], config)]
        if not train:
            continue
        total = len(train) * epochs
        uninterrupted = stream_of(numbered(size), config, seed=trial).next(total)
        # A fifth of the kills fall at an epoch's boundary or one visit beside it.
        kill = draw.randrange(total + 1)
        if trial % 5 == 0:
            kill = min(max(len(train) * draw.randrange(1, epochs + 1) + draw.randrange(-1, 2), 0), total)
        before = stream_of(numbered(size), config, seed=trial)
        got = []
        while len(got) < kill:
            got += before.next(min(batch, kill - len(got)))
        after = stream_of(numbered(size), config, seed=trial)
        after.set_state(json.loads(json.dumps(before.get_state())))
        while len(got) < total:
            got += after.next(min(batch, total - len(got)))
        assert got == uninterrupted
        for epoch in range(epochs):
            part = uninterrupted[epoch * len(train) : (epoch + 1) * len(train)]
            assert sorted(v.example.id for v in part) == sorted(f"e{i}" for i in train)
            assert all(v.uid == visit_uid(v.example.id, epoch) for v in part)


def test_draws_follow_the_chances_are_named_by_the_position_and_resume():
    chances = [0.0, 0.25, 0.0, 0.75]
    stream = stream_of(numbered(4))
    first = stream.draw(1000, chances)
    counts = collections.Counter(visit.example.id for visit in first)
    assert counts.keys() == {"e1", "e3"} and abs(counts["e3"] - 750) < 60  # a deviation is 14
    assert len({visit.uid for visit in first}) == 1000  # each a visit of its own
    again = stream_of(numbered(4))
    again.set_state(json.loads(json.dumps(stream.get_state())))
    second = stream.draw(1000, chances)
    assert again.draw(1000, chances) == second
    assert [v.example.id for v in second] != [v.example.id for v in first]
    assert stream_of(numbered(4), seed=1).draw(1000, chances) != first


def test_every_example_of_the_split_is_listed_by_its_place_and_nothing_moves():
    config = Data(prompt_length=32, held_out_every=3)
    stream = stream_of(numbered(20), config)
    found = list(stream.every())
    assert [visit is None for visit in found] == [is_held_out(example, config) for example in numbered(20)]
    assert all(visit.index == i and visit.prompt for i, visit in enumerate(found) if visit is not None)
    seen = sum(visit is not None for visit in found)
    assert stream.get_state() == {**stream_of(numbered(20), config).get_state(), "seen": seen}


def test_what_is_dropped_of_every_example_counts_as_in_a_walk():
    config = Data(prompt_length=32, held_out_every=3, on_bad_prompt="drop", max_dropped_share=1.0)
    texts = [f"{i}" * 40 if i % 2 else f"{i}" for i in range(90)]
    listed, walked = stream_of(numbered(90, texts), config), stream_of(numbered(90, texts), config)
    assert [*listed.every()] and [*listed.every()] and walked.next(100)
    assert listed.counts == walked.counts != {} and listed.seen == walked.seen
    few = dataclasses.replace(config, max_dropped_share=0.1)
    with pytest.raises(ValueError, match=r"more than Data\.max_dropped_share=0\.1"):
        [*stream_of(numbered(90, texts), few).every()]


def test_epochs_and_seeds_are_shuffled_differently():
    order = [v.example.id for v in stream_of(numbered(50)).next(100)]
    assert order[:50] != order[50:]
    assert order[:50] != [f"e{i}" for i in range(50)]
    assert order[:50] != [v.example.id for v in stream_of(numbered(50), seed=1).next(50)]


def test_a_visit_met_again_has_another_uid():
    visits = stream_of(numbered(1)).next(5)
    assert len({v.uid for v in visits}) == 5


def test_train_and_held_out_share_no_prompt_though_the_source_repeats_texts():
    source = open_addition(Addition(digits=1, size=3000))
    config = Data(prompt_length=32, held_out_every=5)
    train = {v.example.prompt_digest() for v in stream_of(source, config).next(2500)}
    held = {v.example.prompt_digest() for v in held_out(source, TOKENIZER, config, 100 - len(train), seed=3)}
    assert train.isdisjoint(held)
    assert len(train | held) == 100 and held


def test_about_one_prompt_in_ten_is_held_out():
    source = open_addition(Addition(digits=4, size=5000))
    config = Data(prompt_length=32)
    share = sum(is_held_out(source[i], config) for i in range(5000)) / 5000
    assert abs(share - 0.1) < 4 * (0.1 * 0.9 / 5000) ** 0.5


def test_held_out_prompts_are_distinct_and_the_same_every_time():
    source = open_addition(Addition(digits=2, size=20_000))
    config = Data(prompt_length=32)
    visits = held_out(source, TOKENIZER, config, 500, seed=0)
    assert len({v.example.prompt_digest() for v in visits}) == 500
    assert visits == held_out(source, TOKENIZER, config, 500, seed=0)
    assert visits != held_out(source, TOKENIZER, config, 500, seed=1)
    assert held_out(source, TOKENIZER, config, 20, seed=0) == visits[:20]


def test_the_prompts_of_a_step_are_read_once_and_in_the_files_order():
    """Six row groups of 10 rows, and 39 visits: of 39 rows about 13 are held out, of 13 more 4, of 4 more one. The four
    passes unpack at most 6 + 6 + 4 + 1 groups; 57 rows in a random order unpack some 47."""
    config, reads = Data(prompt_length=32, held_out_every=3), []
    plain = numbered(60)
    stream = stream_of(Generated(60, lambda i: reads.append(i) or plain[i], "x"), config)
    visits = stream.next(39)
    order = open_order(60, 0)
    train = [i for i in map(order, range(120)) if not is_held_out(plain[i], config)]
    assert [visit.index for visit in visits] == train[:39]
    assert sorted(reads) == sorted(map(order, range(stream.get_state()["position"])))  # none is read in vain
    groups = [i // 10 for i in reads]
    assert sum(a != b for a, b in zip([-1, *groups], groups)) <= 6 + 6 + 4 + 1
    more = stream.next(80)  # past the epoch's end
    assert [visit.index for visit in more] == [i for i in map(order, range(240)) if not is_held_out(plain[i], config)][
        39:119
    ]


@pytest.mark.parametrize("n", [50, 110])
def test_held_out_prompts_of_a_large_file_are_read_in_its_order(n):
    """Reading a row of another row group unpacks it: 60 groups of 100 rows, of which 1 in 10 is held out and 2 in 10
    of these fit, so about 120. Looking for 50 in a random order unpacks some 2,500 groups."""
    config = Data(prompt_length=32, on_bad_prompt="drop")
    texts = ["y" * (10 if i % 10 < 2 else 40) + str(i) for i in range(6000)]
    unpacked = [-1]

    def make(index):
        if unpacked[-1] != index // 100:
            unpacked.append(index // 100)
        return Example(str(index), (Message("user", texts[index]),))

    visits = held_out(Generated(6000, make, "x"), TOKENIZER, config, n, seed=0)
    # 500 or 1,100 are looked at first, then as many as are missing, or as before: at most 5 passes over the groups.
    assert len(visits) == n and len(unpacked) - 1 <= 5 * 60
    order = open_order(6000, 0)
    usable = [str(i) for i in map(order, range(6000)) if i % 10 < 2 and is_held_out(make(i), config)]
    assert [visit.example.id for visit in visits] == usable[:n]


def test_more_held_out_prompts_than_there_are_is_refused_with_the_number():
    with pytest.raises(ValueError, match="101 held-out prompts requested"):
        held_out(open_addition(Addition(digits=1, size=1000)), TOKENIZER, Data(prompt_length=32), 101, seed=0)


TEXTS = ["good", " \n", "", "x" * 40, "fine", "x" * 26, "x" * 28]  # a prompt of t bytes has t + 4 tokens


def test_bad_prompts_are_refused_by_name():
    config = Data(prompt_length=32, held_out_every=None)
    for i, message in ((1, "'e0': its prompt is empty"), (3, "'e0': its prompt has 44 tokens")):
        with pytest.raises(ValueError, match=message):
            stream_of(numbered(1, [TEXTS[i]]), config).next(1)


def test_length_is_that_of_the_final_ids():
    # bos, user, 27 bytes, end, assistant = 31 tokens
    assert len(stream_of(numbered(1, ["x" * 27]), Data(prompt_length=31, held_out_every=None)).next(1)[0].prompt) == 31
    with pytest.raises(ValueError, match=r"31 tokens, more than Data\.prompt_length = 30"):
        stream_of(numbered(1, ["x" * 27]), Data(prompt_length=30, held_out_every=None)).next(1)


def test_dropped_prompts_are_counted_by_cause_and_the_counts_resume():
    config = Data(prompt_length=32, held_out_every=None, on_bad_prompt="drop")
    stream = stream_of(numbered(7, TEXTS), config)
    visits = stream.next(4 * 3)  # three whole epochs: 4 good prompts in each
    assert collections.Counter(v.example.id for v in visits) == {"e0": 3, "e4": 3, "e5": 3, "e6": 3}
    # Three epochs are walked; an example counts once.
    assert (stream.counts, stream.seen) == ({"empty": 2, "too_long": 1}, 7)
    for early in (0, 1, 2, 3, 9):
        before, again = (stream_of(numbered(7, TEXTS), config) for _ in range(2))
        before.next(early)
        again.set_state(json.loads(json.dumps(before.get_state())))
        assert again.next(8) == before.next(8)
        assert again.get_state() == before.get_state()
        assert again.counts == stream.counts


def test_more_dropped_prompts_than_the_limit_stop_the_run_when_the_first_pass_ends():
    texts = ["x" * 40] * 24 + ["good"] * 16
    config = Data(prompt_length=32, held_out_every=None, on_bad_prompt="drop")
    stream = stream_of(numbered(40, texts), config)
    stream.next(16)
    with pytest.raises(ValueError) as stopped:
        stream.next(1)
    assert str(stopped.value).startswith(
        "24 of 40 prompts exceed Data.prompt_length=32 and were skipped, more than Data.max_dropped_share=0.5"
    )
    allowed = dataclasses.replace(config, max_dropped_share=0.6)  # 24 of 40, exactly
    assert len(stream_of(numbered(40, texts), allowed).next(100)) == 100


def test_held_out_prompts_do_not_count_towards_the_limit():
    config = Data(prompt_length=32, held_out_every=3, on_bad_prompt="drop", max_dropped_share=1.0)
    texts = [f"{i}" * 40 if i % 2 else f"{i}" for i in range(90)]
    train = [i for i in range(90) if not is_held_out(numbered(90, texts)[i], config)]
    stream = stream_of(numbered(90, texts), config)
    stream.next(100)
    assert stream.seen == len(train) < 90
    assert stream.counts == {"too_long": sum(i % 2 for i in train)}


def test_a_step_of_a_small_source_looks_a_place_up_a_few_times(monkeypatch):
    """One-example training takes the same prompt for a whole step; all places ahead were looked up for each of them."""
    places = []
    counted = lambda size, seed: (lambda order: lambda position: places.append(position) or order(position))(
        open_order(size, seed)
    )
    monkeypatch.setattr("jrl.tasks.data.stream.open_order", counted)
    for size in (1, 3):
        places.clear()
        assert len(stream_of(numbered(size)).next(64)) == 64
        assert len(places) <= 3 * 64


def test_a_large_source_is_stopped_long_before_its_first_pass_ends():
    read = []
    source = numbered(1_000_000)
    texts = lambda i: read.append(i) or Example(f"e{i}", (Message("user", "x" * 40 if i % 10 else "good"),), answer="1")
    source = dataclasses.replace(source, make=texts)
    config = Data(prompt_length=32, held_out_every=None, on_bad_prompt="drop")
    with pytest.raises(ValueError, match=r"\d+ of 10\d\d prompts exceed"):
        stream_of(source, config).next(200)
    assert len(read) < 1100


def test_looking_for_prompts_stops_when_it_is_asked_to():
    asked = []
    stop = lambda: asked.append(1) or len(asked) > 30
    stream = stream_of(numbered(50), stop=stop)
    first = stream.next(20)
    before = stream.get_state()
    with pytest.raises(StopRequested, match="asked to stop while reading prompts"):
        stream.next(20)
    assert stream.get_state() == before
    assert first == stream_of(numbered(50)).next(20)
    with pytest.raises(StopRequested, match="held-out"):
        held_out(numbered(50), TOKENIZER, Data(prompt_length=32), 3, seed=0, stop=stop)
    with pytest.raises(StopRequested, match="tokenizer"):
        list(texts_of(numbered(50), EVERYTHING, stop=stop))


def test_what_was_dropped_is_told_in_one_sentence():
    config = Data(prompt_length=32)
    assert dropped_prompts({}, 40, config) == ""
    assert dropped_prompts({"empty": 2, "too_long": 3}, 40, config) == (
        "3 of 40 prompts exceed Data.prompt_length=32 and 2 of 40 prompts are empty and were skipped"
    )


@pytest.mark.parametrize("texts", [["", " "], ["x" * 100, ""]])
def test_nothing_usable_is_an_error_and_not_a_loop(texts):
    config = Data(prompt_length=32, held_out_every=None, on_bad_prompt="drop", max_dropped_share=1.0)
    with pytest.raises(ValueError, match="none of the 2 examples can be used for training"):
        stream_of(numbered(2, texts), config).next(1)


def test_an_empty_split_is_an_error():
    with pytest.raises(ValueError, match="none of the 5 examples can be used for training"):
        stream_of(numbered(5), Data(prompt_length=32, held_out_every=1)).next(1)
    with pytest.raises(ValueError, match="no examples"):
        stream_of(numbered(0))


def test_a_position_of_another_order_is_refused():
    state = stream_of(numbered(5)).get_state()
    for other in (stream_of(numbered(6)), stream_of(numbered(5), seed=1)):
        with pytest.raises(ValueError, match="data position saved with"):
            other.set_state(state)


@pytest.mark.parametrize("wrong", [{"prompt_length": 0}, {"held_out_every": -1}, {"held_out_every": 0},
                                   {"max_dropped_share": 1.5}])  # fmt: skip
def test_senseless_data_configs_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Data(**{"prompt_length": 8, **wrong})


def test_five_thousand_random_prompts_are_used_or_counted_and_nothing_else(trials):
    draw = random.Random(3)
    pieces = ["", " ", "\n\t", "a", "\u65e5\u672c", "<|end|>", "x" * 9, "\U0001f389", "\u2581"]
    texts = ["".join(draw.choices(pieces, k=draw.randrange(6))) for _ in range(trials(5000, seed=3))]
    config = Data(prompt_length=20, held_out_every=None, on_bad_prompt="drop", max_dropped_share=1.0)
    # By hand: a prompt costs its UTF-8 bytes and four controls, and is empty where only blanks are left.
    empty = sum(not text.strip() for text in texts)
    too_long = sum(bool(text.strip()) and len(text.encode()) + 4 > 20 for text in texts)
    good = 5000 - empty - too_long
    assert min(empty, too_long, good) > 100
    stream = stream_of(numbered(5000, texts), config)
    visits = stream.next(good)
    assert len({v.example.id for v in visits}) == good
    assert max(len(v.prompt) for v in visits) <= 20
    stream.next(1)  # walks what is left of the epoch, and somewhat into the next
    assert stream.counts == {"empty": empty, "too_long": too_long}
    assert stream.seen == 5000
