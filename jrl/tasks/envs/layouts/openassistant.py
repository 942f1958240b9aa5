"""OpenAssistant's conversation trees: nested, one row per tree, and flat, one row per message.

Every message of a prompter becomes a prompt with the assistant's replies as its answers, ranked by `rank` (0 is the
best) or by a label. Deleted messages and all replies below them are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jrl.tasks.envs.layouts.contract import PAIR_TAKES, Answer, Layout, Prompted
from jrl.tasks.envs.layouts.fields import BadField, Field, texts
from jrl.tasks.example import Message

ROLES = {"prompter": "user", "assistant": "assistant"}
RANKED_BY = ("rank", "quality", "helpfulness")
MOST_SIBLINGS = 10_000


class Node(NamedTuple):
    """A message of a tree."""

    field: Field
    id: str
    role: str  # a key of ROLES
    text: str
    lang: dict[str, str]  # {"lang": its language}; {} if unknown
    rank: int | None
    labels: dict[str, float]
    deleted: bool


class Tree(NamedTuple):
    nodes: list[Node]  # the root first, each after its parent
    parents: list[int]  # the index of each node's parent; -1 for the root


def node_of(field: Field) -> Node:
    """Returns the message of an object. Raises: BadField."""
    rank, deleted = field.optional("rank"), field.optional("deleted")
    return Node(
        field,
        field["message_id"].text(),
        field["role"].one_of(tuple(ROLES), "unknown_role"),
        field["text"].text(),
        texts(field, ("lang",)),
        None if rank is None else rank.whole(0, MOST_SIBLINGS),
        labels_of(field),
        deleted is not None and deleted.flag(),
    )


def labels_of(field: Field) -> dict[str, float]:
    """Returns a message's labels, each from 0 to 1: from {name: {"value": v}}, or from columns of names and values.
    Raises: BadField."""
    labels = field.optional("labels")
    if labels is None:
        return {}
    if isinstance(labels.value, dict) and isinstance(labels.value.get("name"), list):
        names, values = labels.value["name"], labels["value"]
        if not isinstance(values.value, list) or len(values.value) != len(names):
            raise BadField("contradiction", values, f"it is not one number for each of {len(names)} names")
        if not names:
            return {}
        return {n.text(): v.number(0, 1) for n, v in zip(labels["name"].items(), values.items())}
    if not isinstance(labels.value, dict):
        raise BadField("wrong_type", labels, "it is not an object")
    return {name: labels[name]["value"].number(0, 1) for name in labels.value}


def nested(row: Field) -> Tree:
    """Returns the tree under a row's `prompt`. Raises: BadField."""
    nodes: list[Node] = []
    parents: list[int] = []
    seen: dict[str, int] = {}
    stack = [(row["prompt"], -1)]
    while stack:
        field, parent = stack.pop()
        node = node_of(field)
        named = field.optional("parent_id")
        if named is not None and (parent < 0 or named.text() != nodes[parent].id):
            reply = "the root of a tree replies to none" if parent < 0 else "in the tree it replies to another one"
            raise BadField("missing_parent", named, reply)
        if node.id in seen:
            ancestor = parent
            while ancestor >= 0 and ancestor != seen[node.id]:
                ancestor = parents[ancestor]
            raise BadField("duplicate_message" if ancestor < 0 else "cycle", field["message_id"])
        seen[node.id] = len(nodes)
        stack += [(reply, len(nodes)) for reply in reversed(_replies(field))]
        nodes.append(node)
        parents.append(parent)
    return Tree(nodes, parents)


def _replies(field: Field) -> list[Field]:
    replies = field.optional("replies")
    return [] if replies is None or replies.value == [] else replies.items()


def flat(rows: Sequence[Field]) -> Tree:
    """Returns the tree of messages that are rows and name their parents. Raises: BadField."""
    nodes = [node_of(row) for row in rows]
    indices: dict[str, int] = {}
    for i, node in enumerate(nodes):
        if indices.setdefault(node.id, i) != i:
            raise BadField("duplicate_message", node.field["message_id"])
    children: list[list[int]] = [[] for _ in nodes]
    roots = []
    for i, node in enumerate(nodes):
        named = node.field.optional("parent_id")
        if named is None:
            roots.append(i)
        elif named.text() not in indices:
            raise BadField("missing_parent", named)
        else:
            children[indices[named.text()]].append(i)
    if len(roots) > 1:
        raise BadField("contradiction", nodes[roots[1]].field["message_tree_id"], "the tree has a root already")
    order, parents, stack = [], [], [(root, -1) for root in roots]
    while stack:
        i, parent = stack.pop()
        stack += [(child, len(order)) for child in reversed(children[i])]
        order.append(i)
        parents.append(parent)
    if len(order) < len(nodes):  # every parent exists, so the unreached messages are on a cycle or below one
        raise BadField("cycle", _on_cycle(nodes, indices, set(range(len(nodes))) - set(order)).field["parent_id"])
    return Tree([nodes[i] for i in order], parents)


def _on_cycle(nodes: Sequence[Node], indices: dict[str, int], unreached: set[int]) -> Node:
    """Returns the first message of the cycle above the first message that the root does not reach."""
    i = min(unreached)
    for _ in unreached:
        i = indices[nodes[i].field["parent_id"].text()]
    cycle = [i]
    while (parent := indices[nodes[cycle[-1]].field["parent_id"].text()]) != i:
        cycle.append(parent)
    return nodes[min(cycle)]


def prompts_of(tree: Tree, rank_by: str | None, info: dict[str, str]) -> list[Prompted]:
    """Returns a prompt for every message of a prompter: the path from the root to it, and the replies as its answers.
    Raises: BadField if a message replies to one of the same role, or two siblings have the same rank."""
    nodes, parents = tree
    left_out, replies = [], [[] for _ in nodes]
    ranks: set[tuple[int, int]] = set()
    for i, (node, parent) in enumerate(zip(nodes, parents)):
        expected = "assistant" if parent >= 0 and nodes[parent].role == "prompter" else "prompter"
        if node.role != expected:
            before = f"it replies to one of the role {node.role!r}" if parent >= 0 else "it begins the conversation"
            raise BadField("wrong_turn", node.field["role"], before)
        if node.rank is not None and (parent, node.rank) in ranks:
            raise BadField("contradiction", node.field["rank"], f"a sibling has the rank {node.rank}, too")
        if node.rank is not None:
            ranks.add((parent, node.rank))
        left_out.append(node.deleted or (parent >= 0 and left_out[parent]))
        if parent >= 0 and not left_out[i]:
            replies[parent].append(i)
    prompts = []
    for i, node in enumerate(nodes):
        if node.role == "prompter" and not left_out[i]:
            path = [i]
            while parents[path[-1]] >= 0:
                path.append(parents[path[-1]])
            messages = tuple(Message(ROLES[nodes[j].role], nodes[j].text) for j in reversed(path))
            answers = tuple(_answer(nodes[j], rank_by) for j in replies[i])
            prompts.append(Prompted(messages, answers, {**info, **node.lang}))
    return prompts


def _answer(node: Node, rank_by: str | None) -> Answer:
    info = {**node.labels, **({} if node.rank is None else {"rank": node.rank})}
    if rank_by == "rank":
        return Answer(node.text, None if node.rank is None else -float(node.rank), info)
    score = node.labels.get(rank_by)
    return Answer(node.text, score, info if score is None else {**info, "score": score})


def read_trees(row: Field, rank_by: str | None) -> list[Prompted]:
    return prompts_of(nested(row), rank_by, {"tree": row["message_tree_id"].text()})


def read_messages(rows: list[Field], rank_by: str | None) -> list[Prompted]:
    return prompts_of(flat(rows), rank_by, {"tree": rows[0]["message_tree_id"].text()})


def tree_key(row: Field) -> str:
    node_of(row)
    parent = row.optional("parent_id")
    if parent is not None:
        parent.text()
    return row["message_tree_id"].text()


def _message(name: str, parent: str | None, role: str, text: str, rank: int | None = None) -> dict:
    return {"message_id": name, "parent_id": parent, "role": role, "text": text, "lang": "en", "rank": rank}


_ASKED = _message("m1", None, "prompter", "Name a prime.")
_REPLIES = [_message("m2", "m1", "assistant", "7", 0), _message("m3", "m1", "assistant", "8", 1)]

TREES = Layout(
    read=read_trees,
    takes=PAIR_TAKES,
    example=[{"message_tree_id": "m1", "prompt": {**_ASKED, "replies": _REPLIES}}],
    of="OpenAssistant's trees (oasst1, oasst2), a row for each tree",
    rank_by=RANKED_BY,
)
MESSAGES = Layout(
    read=read_messages,
    takes=PAIR_TAKES,
    example=[{"message_tree_id": "m1", **one} for one in (_ASKED, *_REPLIES)],
    of="the same trees, a row for each message, which names its parent",
    rank_by=RANKED_BY,
    group=tree_key,
)
