"""Pairs of answers to a prompt, chosen and rejected, in their published formats."""

from __future__ import annotations

from collections.abc import Sequence

from jrl.tasks.envs.layouts.contract import PAIR_TAKES, Answer, Layout, Prompted
from jrl.tasks.envs.layouts.conversations import answer_of, compared, different, messages, prompt_of, split_pair
from jrl.tasks.envs.layouts.fields import BadField, Field, texts
from jrl.tasks.example import Message


def read_preference(row: Field, rank_by: str | None) -> list[Prompted]:
    chosen, rejected = different(answer_of(row["chosen"]), answer_of(row["rejected"]), row["rejected"])
    return [Prompted(prompt_of(row["prompt"]), compared(chosen, rejected))]


def read_implicit_preference(row: Field, rank_by: str | None) -> list[Prompted]:
    fields = row["chosen"], row["rejected"]
    prompt, chosen, rejected = split_pair(*map(messages, fields), fields)
    return [Prompted(prompt, compared(chosen, rejected))]


def read_scored_preference(row: Field, rank_by: str | None) -> list[Prompted]:
    fields = row["chosen"], row["rejected"]
    prompt, *answers = split_pair(*map(messages, fields), fields)
    if prompt_of(row["prompt"])[-1].content.strip() != prompt[-1].content.strip():
        raise BadField("no_shared_prompt", row["chosen"], "it begins with another text than field 'prompt'")
    scores = row["score_chosen"].number(), row["score_rejected"].number()
    if scores[0] < scores[1]:
        raise BadField("contradiction", row["score_rejected"], "it is above that of the chosen answer")
    info = texts(row, ("prompt_id", "source"))
    return [Prompted(prompt, by_score(answers, scores), info)]


def by_score(answers: Sequence[str], scores: Sequence[float]) -> tuple[Answer, ...]:
    """Returns the two answers, the one with the higher score preferred; neither if the scores are equal."""
    label = lambda score: {"label": score == max(scores)} if scores[0] != scores[1] else {}
    return tuple(Answer(a, score, {"score": score, **label(score)}) for a, score in zip(answers, scores))


def read_margin_preference(row: Field, rank_by: str | None) -> list[Prompted]:
    margin = row["margin"].number(low=0)
    (prompted,) = read_preference(row, rank_by)
    return [prompted._replace(info={"margin": margin})]


def read_stack_exchange(row: Field, rank_by: str | None) -> list[Prompted]:
    better, worse = different(row["response_j"].text(), row["response_k"].text(), row["response_k"])
    return [Prompted((Message("user", row["question"].text()),), compared(better, worse))]


def read_shp(row: Field, rank_by: str | None) -> list[Prompted]:
    sides = different(row["human_ref_A"].text(), row["human_ref_B"].text(), row["human_ref_B"])
    scores = row["score_A"].number(), row["score_B"].number()
    first = row["labels"].flag()
    if (scores[0] < scores[1]) if first else (scores[1] < scores[0]):
        raise BadField("contradiction", row["labels"], "the answer that it prefers has the lower score")
    answers = [Answer(a, float(first == (i == 0)), {"label": first == (i == 0)}) for i, a in enumerate(sides)]
    answers = tuple(a._replace(info={**a.info, "score": score}) for a, score in zip(answers, scores))
    return [Prompted((Message("user", row["history"].text()),), answers)]


def read_webgpt(row: Field, rank_by: str | None) -> list[Prompted]:
    sides = different(row["answer_0"].text(), row["answer_1"].text(), row["answer_1"])
    scores = row["score_0"].number(-1, 1), row["score_1"].number(-1, 1)
    if scores[0] != -scores[1]:
        raise BadField("contradiction", row["score_1"], "it is not the negative of field 'score_0'")
    answers = by_score(sides, scores)
    return [Prompted((Message("user", row["question"]["full_text"].text()),), answers)]


def read_tldr_comparisons(row: Field, rank_by: str | None) -> list[Prompted]:
    """Returns a pair of summaries. The prompt is ARTICLE, TL;DR, or as in 2009.01325 SUBREDDIT, TITLE, POST, TL;DR."""
    summaries = row["summaries"].items()
    if len(summaries) != 2:
        raise BadField("wrong_type", row["summaries"], f"it has {len(summaries)} summaries, not 2")
    sides = [summary["text"].text().strip() for summary in summaries]
    different(*sides, summaries[1]["text"])
    better = row["choice"].whole(0, 1)
    info, extra = {}, row.optional("extra")
    if extra is not None and (confidence := extra.optional("confidence")) is not None:
        info["confidence"] = confidence.whole(1, 9)
    answers = tuple(Answer(a, float(i == better), {"label": i == better}) for i, a in enumerate(sides))
    return [Prompted((Message("user", _asked(row["info"])),), answers, info)]


def _asked(info: Field) -> str:
    article = info.optional("article")
    if article is not None:
        return f"ARTICLE: {article.text()}\n\nTL;DR:"
    subreddit, title, post = (info[name].text() for name in ("subreddit", "title", "post"))
    return f"SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:"


def read_safe_rlhf(row: Field, rank_by: str | None) -> list[Prompted]:
    """Returns a pair ranked by `better_response_id`, or by `safer_response_id`."""
    sides = different(row["response_0"].text(), row["response_1"].text(), row["response_1"])
    safe = [row[f"is_response_{i}_safe"].flag() for i in (0, 1)]
    better, safer = row["better_response_id"].whole(0, 1), row["safer_response_id"].whole(0, 1)
    if safe[1 - safer] and not safe[safer]:
        raise BadField("contradiction", row["safer_response_id"], "it names the answer that is not safe")
    first = safer if rank_by == "safer_response_id" else better
    answers = (Answer(a, float(i == first), {"label": i == first, "safe": safe[i]}) for i, a in enumerate(sides))
    return [Prompted((Message("user", row["prompt"].text()),), tuple(answers))]


_ASKED = {"role": "user", "content": "Name a prime."}
_RIGHT, _WRONG = {"role": "assistant", "content": "7"}, {"role": "assistant", "content": "8"}

PREFERENCE = Layout(
    read=read_preference, takes=PAIR_TAKES, example=[{"prompt": "Name a prime.", "chosen": "7", "rejected": "8"}],
    of="an explicit prompt with two answers, texts or lists of messages",
)  # fmt: skip
IMPLICIT_PREFERENCE = Layout(
    read=read_implicit_preference, takes=PAIR_TAKES,
    example=[{"chosen": [_ASKED, _RIGHT], "rejected": [_ASKED, _WRONG]}],
    of="two conversations that differ in the last answer: the preference mixtures of Tulu 3 and OLMo 2, Skywork",
)  # fmt: skip
SCORED_PREFERENCE = Layout(
    read=read_scored_preference,
    takes=PAIR_TAKES,
    example=[
        {"prompt": "Name a prime.", "chosen": [_ASKED, _RIGHT], "rejected": [_ASKED, _WRONG], "score_chosen": 8.0,
         "score_rejected": 2.5}
    ],
    of="UltraFeedback binarized, as Zephyr learned from",
)  # fmt: skip
MARGIN_PREFERENCE = Layout(
    read=read_margin_preference, takes=PAIR_TAKES,
    example=[{"prompt": "Name a prime.", "chosen": "7", "rejected": "8", "margin": 2.0}],
    of="pairs and how much better the chosen answer is, for losses with a margin",
)  # fmt: skip
STACK_EXCHANGE = Layout(
    read=read_stack_exchange, takes=PAIR_TAKES,
    example=[{"question": "Name a prime.", "response_j": "7", "response_k": "8"}],
    of="Stack Exchange paired",
)  # fmt: skip
SHP = Layout(
    read=read_shp, takes=PAIR_TAKES,
    example=[{"history": "Name a prime.", "human_ref_A": "7", "human_ref_B": "8", "labels": 1, "score_A": 9,
              "score_B": 4}],
    of="Stanford Human Preferences",
)  # fmt: skip
WEBGPT_COMPARISONS = Layout(
    read=read_webgpt, takes=PAIR_TAKES,
    example=[{"question": {"full_text": "Name a prime."}, "answer_0": "7", "score_0": 0.5, "answer_1": "8",
              "score_1": -0.5}],
    of="WebGPT's comparisons",
)  # fmt: skip
TLDR_COMPARISONS = Layout(
    read=read_tldr_comparisons, takes=PAIR_TAKES,
    example=[{"info": {"subreddit": "math", "title": "Primes", "post": "I like 7."},
              "summaries": [{"text": "Likes 7."}, {"text": "Primes."}], "choice": 0, "extra": {"confidence": 8}}],
    of="comparisons of summaries, summarize_from_feedback",
)  # fmt: skip
SAFE_RLHF = Layout(
    read=read_safe_rlhf, takes=PAIR_TAKES,
    example=[{"prompt": "Name a prime.", "response_0": "7", "response_1": "8", "is_response_0_safe": True,
              "is_response_1_safe": True, "better_response_id": 0, "safer_response_id": 0}],
    of="PKU-SafeRLHF",
    rank_by=("better_response_id", "safer_response_id"),
)  # fmt: skip
