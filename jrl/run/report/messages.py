"""The sentences a run says to a person. No JAX, no effects."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jrl.run.report.text import counted, duration, percent, printable

SCORED_ENOUGH = 0.9  # share of completions scored, below which a run warns
_DETAIL_WIDTH = 300


def resume_message(done: int, total: int, *, has_ended: bool) -> str:
    """Returns where a run continues, or that it has all the steps asked for.

    Args:
      has_ended: whether it has its summary. A run that was stopped in its last evaluation has all steps and no summary.
    """
    if done < total or (done == total and not has_ended):
        return f"Resumed after step {done} of {total}."
    if done == total:
        return f"This run already has {'its step' if total == 1 else f'all {total} steps'}. Nothing to do."
    return f"This run already has {counted(done, 'step')}; you asked for {total}. Nothing to do."


def condemned_message(steps: Sequence[int]) -> str:
    """Returns which checkpoints a run passes over because weights or later updates were not finite."""
    return (
        f"Passed over: the checkpoint{'s' if len(steps) > 1 else ''} of step {', '.join(map(str, steps))}: weights or "
        "the updates after them were not finite (RUN/checkpoints/*.condemned)."
    )


def examples_at_fault(sequences: Sequence[int] | None, ids: Sequence[str], count: int) -> str:
    """Returns which examples a value that is not finite concerns.

    Args:
      sequences: those of the batch that it is in; (): none alone, such as a weight or a sum; None: not known.
      ids: of the example of every sequence; () where that is not known. count: sequences of the batch.
    """
    if sequences is None:
        return "of which examples is not known"
    if not sequences or len({*sequences}) >= count:
        return f"no single example: all {count} sequences of the batch"
    names = list(dict.fromkeys(ids[n] for n in sequences if n < len(ids)))
    what = "in rows of the examples" if names else "in sequences of the batch whose examples are not known:"
    listed = [printable(repr(name), 80) for name in names] or [str(n) for n in sequences]
    more = f" and {len(listed) - 4} more" if len(listed) > 4 else ""
    return f"{what} {', '.join(listed[:4])}{more}"


def not_finite_message(
    *,
    first: int,
    last: int,
    stage: str,
    losses: str,
    fault: str,
    examples: str,
    good: int | None,
    condemned: Sequence[int],
    bundle: str,
) -> str:
    """Returns why a run stopped whose updates were not finite, and how it can go on.

    Args:
      first, last: the steps that were skipped. losses: loss and gradient norm of the last.
      fault: where it was not finite first. examples: those that it concerns, as `examples_at_fault` says it.
      good: the newest checkpoint that a later step has learned from. condemned: those that were set aside.
      bundle: how to replay it, or why that is not possible.
    """
    return (
        f"{last - first + 1} updates in a row were not finite: steps {first} to {last} of stage {stage} ({losses}). "
        f"First not finite: {fault}; {examples}. {from_good(good, condemned)} {bundle}"
    )


def bad_end_message(
    stage: str, doubts: Sequence[str], *, fault: str, good: int | None, condemned: Sequence[int]
) -> str:
    """Returns why a run stops whose stage has done all its steps.

    Args:
      doubts: as `doubts` returns them.
      fault: where the weights are not finite. good, condemned: as in `not_finite_message`.
    """
    ended = f"The stage {stage} has ended with weights that are not finite: {fault}."
    return " ".join([ended, *doubts, from_good(good, condemned)])


def doubt_message(doubts: Sequence[str]) -> str:
    """Returns what there is to say of a stage that ends with finite weights where updates left doubt of them."""
    return " ".join([*doubts, "The weights are finite. See the metrics of updates in metrics.jsonl."])


def doubts(done: int, skipped: int, overflowed: Mapping[str, int]) -> list[str]:
    """Returns a sentence for each reason to doubt that weights are finite.

    Args:
      done: the steps of the run. skipped: how many of the last skipped an update.
      overflowed: {role: step} of updates whose norm was not finite.
    """
    steps = f"step {done}" if skipped == 1 else f"steps {done - skipped + 1} to {done}"
    last = [f"Updates of {steps} were skipped, since the loss or the gradient was not finite."] if skipped else []
    large = "The update of the role {} at step {} was so large that its norm is not finite."
    return [*last, *(large.format(role, step) for role, step in sorted(overflowed.items()))]


def from_good(good: int | None, condemned: Sequence[int]) -> str:
    """Returns where a run goes on whose updates were not finite."""
    aside = f" Checkpoints of step {', '.join(map(str, condemned))} are set aside as *.condemned." if condemned else ""
    rerun = f"Last good checkpoint: step {good}" if good is not None else "No checkpoint is good"
    again = "a rerun continues from it" if good is not None else "a rerun begins anew"
    return (
        f"{rerun}; {again}, and meets the same fault where nothing is changed: see the learning rate, the rewards and "
        f"the data, and continue with --accept-change (in Python accept_change=True).{aside}"
    )


def saved_message(done: int, total: int) -> str:
    """Returns what a run that was asked to stop says when it leaves."""
    return f"Saved after step {done} of {total}. Run the same command to continue."


def scoring_warning(valid_share: float, detail: str) -> str | None:
    """Returns a warning that too few completions were scored; None where enough were.

    Args:
      valid_share: scored completions over all completions of a step.
      detail: the verifier's message on the first completion that was not scored; '' where there is none.
    """
    if not valid_share < SCORED_ENOUGH:
        return None
    first = printable(detail, _DETAIL_WIDTH) if detail else "the verifier gave no detail"
    if valid_share == 0:
        return f"Warning: no completion was scored, so there is no reward. First failure: {first}"
    share = percent(valid_share)
    return f"Warning: only {share} of completions were scored; the reward is their mean. First failure: {first}"


def lost_rollouts_warning(run: str | os.PathLike[str], lost: Sequence[str]) -> str:
    """Returns a warning that files of the stored rollouts are missing or empty.

    Args:
      lost: those files, described.
    """
    more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
    return (
        f"Warning: stored rollouts are lost: {', '.join(lost[:3])}{more}, in {run}/rollouts. Training does not read "
        "them and goes on; `jrl rollouts` and `jrl replay` cannot read those rows. A resume looks for no "
        "other damage to older rollouts: `jrl doctor` reads every chunk"
    )


def no_signal_warning(num_steps: int, scored: bool = True) -> str:
    """Returns the likely causes of a run in which every completion of a prompt gets the same reward.

    Args:
      scored: whether any completion got a reward in the last of them.
      num_steps: steps so far, none with a group whose rewards differ. A run that had a signal and lost it may have
        learned all there is: that needs no warning.
    """
    steps = f"{num_steps} step{'' if num_steps == 1 else 's'}"
    if not scored:
        return (
            f"Warning: no learning signal in {steps}: no completion was scored, and the policy does not change. Likely "
            "causes:\n"
            "  - a verifier runs into its limits (Scoring.cpu_seconds, wall_seconds, memory_mb): try jrl check\n"
            "  - a judge or a reward model gives no verdict: see the metrics verdict/*, and RUN/rollouts"
        )
    return (
        f"Warning: no learning signal in {steps}. In every group all "
        "completions got the same reward, so all advantages are 0 and the policy does not change. Likely causes:\n"
        "  - the verifier is too strict or too lenient: read completions and rewards in RUN/rollouts\n"
        "  - the prompts are too hard or too easy for this policy\n"
        "  - too few samples per prompt (Online.samples)\n"
        "  - sampling is nearly greedy (Sampler.temperature)"
    )


class LostSignal(NamedTuple):
    """A run that has had no gradient for `steps` steps. Its mean reward was `before` at the last step that had one, and
    is `after` now."""

    steps: int
    before: float
    after: float


def collapse_warning(lost: LostSignal) -> str:
    """Returns the likely causes of a run that had a learning signal and lost it before it had learned all there is."""
    return (
        f"Warning: no learning signal in the last {lost.steps} steps (mean reward {lost.before:.3f} when there was "
        f"one, {lost.after:.3f} now). No completion gives a gradient, so the policy does not change, though rewards "
        "differ between prompts or were higher. Likely causes:\n"
        "  - too large a learning rate: begin again with a smaller one\n"
        "  - updates that go too far: a KL to the reference, a smaller clip or fewer epochs bound them\n"
        "  - the prompts that it can learn are learned: a curriculum or more samples find others\n"
        "  - completions are filtered out (DAPO.overlong_filter: see rollout/completion_length)\n"
        "  - sampling is nearly greedy (Sampler.temperature)"
    )


def evaluation_line(name: str, result: Mapping[str, Any]) -> str:
    """Returns an evaluation as one line.

    Args:
      name: when it was done ('before RL'). result: mean, low, high, n as in summary.json.
    """
    if result["mean"] is None:
        return f"{name}: no held-out completion could be scored"
    low, high = 100 * result["low"], 100 * result["high"]
    return f"{name}: {100 * result['mean']:.1f} % of {result['n']} held-out prompts [{low:.1f}, {high:.1f}]"


def left_out_message(evals: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns which evaluations are not compared with later ones, after an accepted change of what they measure."""
    lines = [evaluation_line(name.replace("_", " "), result) for name, result in evals.items()]
    return "left out of the summary, measured by another evaluation: " + "; ".join(lines)


def best_line(run: str | os.PathLike[str], step: int, mean: float) -> str:
    """Returns which checkpoint is the best, and how to take it out of the run."""
    command = f"jrl export {shlex.quote(os.fspath(run))} --step best --to DIR"
    return f"best checkpoint: step {step}, {100 * mean:.1f} % of held-out prompts; {command} writes its policy"


def closing_message(
    run: str | os.PathLike[str],
    *,
    steps: int,
    seconds: float,
    final_reward: float | None,
    steps_without_signal: int = 0,
    lost: LostSignal | None = None,
    skipped: int = 0,
    role: str = "policy",
) -> str:
    """Returns what stands below the last panel of a run that has ended.

    Args:
      final_reward: mean reward of the last step; None where none was scored.
      steps_without_signal: all steps of a run in which no group ever had rewards that differ; 0 for any other.
      lost: the signal that it lost on the way; None: it has one, or never had.
      skipped: how many of the last steps skipped an update.
      role: what it trained: "policy" if any stage did, else the role of the last one.
    """
    reward = f", final reward {final_reward:.3f}" if final_reward is not None and math.isfinite(final_reward) else ""
    ended = (
        f"Done: {counted(steps, 'step')} in {duration(seconds)}{reward}. Metrics, rollouts and checkpoints are in {run}"
    )
    argument = shlex.quote(os.fspath(run))
    if steps == 0:
        return ended
    if skipped:
        return "\n".join([ended, *doubts(steps, skipped, {}), f"Examine the run: jrl doctor {argument}"])
    if steps_without_signal:
        return f"{ended}\n{no_signal_warning(steps_without_signal, scored=bool(reward))}"
    if lost is not None:
        return f"{ended}\n{collapse_warning(lost)}\nExamine the run: jrl doctor {argument}"
    if role != "policy":
        return f"{ended}\nScore texts with the role {role}: jrl score {argument} ROWS.jsonl --role {role} --out X.jsonl"
    return f"{ended}\nTry the policy: jrl sample {argument}"
